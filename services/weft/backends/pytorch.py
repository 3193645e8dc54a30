"""``pytorch``: programs of ``torch.export`` on CPU or CUDA."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.contract import DEFAULT_MAX_BATCH_SIZE, check_file, completed
from weft.backends.gpu import is_pinning_enabled, torch_device
from weft.backends.pt2 import ProgramTensors, load_program, read_program
from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import existing_file
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.base import TensorBackend
from weft.serving.backends.layout import file_signature, is_ragged
from weft.serving.backends.loading import model_file, require, require_installed
from weft.serving.backends.parameters import ParameterReader

_FILENAME = "model.pt2"
_NUMBERED = re.compile(r".+__(\d+)")
_AUTOCASTS = {"none": "", "bf16": "bfloat16", "fp16": "float16"}
_COMPILERS = ("none", "inductor", "eager")


class _Threads:
    """A setting of the whole process."""

    lock = threading.Lock()
    asked_for: int | None = None


class PyTorchBackend(TensorBackend):
    """Runs ``model.pt2`` (or ``default_model_filename``) of the version folder, a file of ``torch.export.save``.

    Tensors are matched by name, if every declared input is an argument of the exported module (and every declared
    output a key of the dict that it returns); else by number, if the names end in ``__0``, ``__1``, ...; else in the
    declared order. With ``max_batch_size`` the first dimension of every tensor must have been exported as dynamic. The
    program runs in inference mode, on the instance's GPU or on the CPU. TorchScript and pickled modules are rejected.

    A GPU instance has a CUDA stream of its own and waits for no other. Its inputs are gathered in pinned memory and its
    outputs copied to pinned memory, unless ``optimization { input_pinned_memory { enable: false } }`` or
    ``output_pinned_memory`` disables it. If torch cannot use the GPU, an instance of KIND_AUTO runs on the CPU with a
    warning in the log, and one of KIND_GPU fails to load.

    Parameters (all optional):
        AUTOCAST: ``bf16`` or ``fp16``: operators that benefit compute in that type (``torch.autocast``); outputs still
            have the types of the export. Default ``none``.
        CHANNELS_LAST: Four-dimensional tensors and weights use the NHWC memory format. Default false.
        TORCH_COMPILE: ``inductor`` or ``eager``: the backend of ``torch.compile``. Batches are padded with copies of
            their last row to a power of two of rows, or to ``max_batch_size``, so that few shapes are compiled;
            ``batch_buckets`` does the same for lengths. A shape is compiled when it first occurs: let ``model_warmup``
            send each. torch runs shapes after the eighth uncompiled. Default ``none``.
        INTRA_OP_THREAD_COUNT: Threads inside an operator, on CPU. Applies to the whole process: the last loaded model
            that sets it decides. Default 1 as long as no model sets it.

    Shapes that the configuration allows and the exported program does not are INVALID_ARGUMENT.
    """

    def check(self) -> None:
        """Compare the configuration with the program's signature, without torch."""
        self._read_parameters()
        path = self._path()
        self._check_program(read_program(path), path)
        require_installed("torch", "torch")

    def load(self) -> None:
        """Load the program, move it to the device and validate it against the configuration."""
        self._torch = torch = require("torch", "torch")
        num_threads, autocast, is_channels_last, compiler = self._read_parameters()
        self._set_threads(num_threads)
        device = torch_device(torch, self.instance)
        path = self._path()
        self._check_program(read_program(path), path)
        program = load_program(torch, path)
        if device.type == "cuda":
            program = require("torch.export.passes", "torch").move_to_device_pass(program, str(device))
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        self._types = [values[name].dtype for name in program.graph_signature.user_outputs]
        self._spec = program.call_spec.in_spec
        self._module = program.module()
        if is_channels_last:
            self._module.to(memory_format=torch.channels_last)
        self._autocast = getattr(torch, autocast) if autocast else None
        if self._autocast:
            # The program's assertions on the types of the export, which autocast changes.
            assertion, graph = torch.ops.aten._assert_tensor_metadata.default, self._module.graph
            for node in graph.find_nodes(op="call_function", target=assertion):
                graph.erase_node(node)
            self._module.recompile()
        if compiler != "none":
            self._module = torch.compile(self._module, backend=compiler, dynamic=False)
        signature = self.model.signature
        has_rows = not is_ragged(signature, self.model.layout)
        self._max_rows = signature.max_batch_size if has_rows and compiler != "none" else 0
        pins = {f"pins_{way}s": is_pinning_enabled(self.model.config, way) for way in ("input", "output")}
        self._device = TorchDevice(torch, device, is_channels_last=is_channels_last, **pins)
        if self._device.is_gpu:
            self.gather_into(self._device.empty)

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Run the program; releases the GIL inside its operators."""
        bucket = min(1 << (num_rows - 1).bit_length(), max(self._max_rows, num_rows))
        num_added = bucket - num_rows if self._max_rows else 0
        arrays = {name: self._pad_rows(array, num_added) for name, array in inputs.items()} if num_added else inputs
        with ExitStack() as stack:
            stack.enter_context(self._torch.inference_mode())
            stack.enter_context(self._device.running())
            if self._autocast:
                stack.enter_context(self._torch.autocast(self._device.device.type, dtype=self._autocast))
            args, kwargs = self._spec.unflatten([self._device.to_device(arrays[name]) for name in self._inputs])
            try:
                results = self._module(*args, **kwargs)
            except AssertionError as error:  # the guards of the exported program
                raise InvalidArgumentError(
                    f"the shapes of the inputs do not fit the exported program: {error}"
                ) from error
            leaves = self._torch.utils._pytree.tree_leaves(results)
            answers = {
                name: self._device.to_host(leaves[position].to(self._types[position]))
                for name, position in self._outputs.items()
            }
        given = {name: self._device.to_numpy(answer) for name, answer in answers.items()}
        return {name: array[:num_rows] for name, array in given.items()} if num_added else given

    def close(self) -> None:
        """Free the program."""
        del self._module

    def _pad_rows(self, array: Array, num_rows: int) -> Array:
        full = self._device.empty((len(array) + num_rows, *array.shape[1:]), array.dtype)
        full[: len(array)] = array
        full[len(array) :] = array[-1]
        return full

    def _set_threads(self, asked_for: int) -> None:
        with _Threads.lock:
            _Threads.asked_for = asked_for or _Threads.asked_for
            self._torch.set_num_threads(_Threads.asked_for or 1)

    @staticmethod
    def auto_complete(  # type: ignore[override]  # mypy takes the base's for a method
        config: dict[str, Any], directory: Path
    ) -> dict[str, Any]:
        """Fill in inputs, outputs and possibly the batch size from the program.

        A tensor has the name of its argument, or its key in the dict that the module returns, else ``OUTPUT__0``, ...
        """
        path = existing_file(directory, config.get("default_model_filename") or _FILENAME)
        program = read_program(path)
        outputs = program.results
        if not program.has_keys:
            outputs = [tensor._replace(name=f"OUTPUT__{number}") for number, tensor in enumerate(outputs)]
        limit = min(program.max_rows, default=DEFAULT_MAX_BATCH_SIZE)
        return completed(config, path, program.arguments, outputs, max_rows=limit)

    def _path(self) -> Path:
        present = (name for name in (_FILENAME, "model.pt") if (self.model.directory / name).exists())
        return model_file(self.model, next(present, _FILENAME))

    def _read_parameters(self) -> tuple[int, str, bool, str]:
        parameters = ParameterReader(self.model)
        found = (
            parameters.integer("INTRA_OP_THREAD_COUNT", 0, minimum=0),
            _AUTOCASTS[parameters.choice("AUTOCAST", "none", tuple(_AUTOCASTS))],
            parameters.flag("CHANNELS_LAST", False),
            parameters.choice("TORCH_COMPILE", "none", _COMPILERS),
        )
        parameters.finish()
        return found

    def _check_program(self, program: ProgramTensors, path: Path) -> None:
        """Match the declared tensors with those of the program, and validate them."""
        signature = file_signature(self.model.signature, self.model.layout)
        arguments, results = program.arguments, program.results
        names = [argument.name for argument in arguments]
        if len(signature.inputs) != len(arguments):
            raise self.model.error(
                "input",
                f"{path} takes {len(arguments)} inputs ({', '.join(names)}), the "
                f"configuration declares {len(signature.inputs)}",
            )
        inputs = _positions([i.name for i in signature.inputs], names, len(arguments))
        keys = [result.name for result in results] if program.has_keys else []
        self._outputs = _positions([o.name for o in signature.outputs], keys, len(results))
        check_file(
            self.model,
            path,
            [arguments[i]._replace(name=name) for name, i in inputs.items()],
            [results[i]._replace(name=name) for name, i in self._outputs.items() if i < len(results)],
        )
        self._inputs = sorted(inputs, key=inputs.__getitem__)
        if signature.max_batch_size > 0 and (limit := min(program.max_rows)) < signature.max_batch_size:
            text = (
                f"max_batch_size is {signature.max_batch_size}, but {path} was exported for batches of at most {limit}"
            )
            raise self.model.error("max_batch_size", text)


def _positions(declared: Sequence[str], names: Sequence[str], count: int) -> Mapping[str, int]:
    """Position of each declared tensor among the ``count`` tensors of the program: by name, by number, or in order."""
    if set(declared) <= set(names):
        return {name: list(names).index(name) for name in declared}
    numbers = [int(match[1]) for match in map(_NUMBERED.fullmatch, declared) if match]
    if len(set(numbers)) == len(declared) and max(numbers) < count:
        return dict(zip(declared, numbers, strict=True))
    return {name: position for position, name in enumerate(declared)}


class TorchDevice:
    """The device of one instance; on a GPU with a CUDA stream of its own, the only one that it waits for.

    There ``empty`` returns pinned memory, which torch's allocator reuses for later arrays, and ``to_host`` copies to
    such, unless told otherwise. Channels last is the NHWC memory format of four-dimensional tensors.
    """

    def __init__(
        self, torch: Any, device: Any, *, pins_inputs: bool = True, pins_outputs: bool = True, is_channels_last: bool
    ) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._torch = torch
        self._pins_inputs = pins_inputs and self.is_gpu
        self._pins_outputs = pins_outputs and self.is_gpu
        self._is_channels_last = is_channels_last
        self._stream = None
        if self.is_gpu:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights are copied there

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run torch operations of the block on the stream and synchronise at its end, also if the block raises."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """An uninitialised array that ``to_device`` can copy asynchronously if pinned."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=self._pins_inputs)
        array: Array = memory.numpy().view(dtype).reshape(shape)
        return array

    def to_device(self, array: Array) -> Any:
        """Copy an array to the device; complete at the end of ``running``, and the array must not change until then.

        bfloat16 is copied bitwise, because NumPy has no such type of its own.
        """
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        if array.dtype.name == "bfloat16":
            tensor = self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(array)
        tensor = tensor.to(self.device, non_blocking=True)
        if self._is_channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=self._torch.channels_last)
        return tensor

    def to_host(self, tensor: Any) -> Any:
        """Copy a tensor to host memory; complete at the end of ``running``, and only then usable by ``to_numpy``."""
        tensor = tensor.detach()
        if not self.is_gpu:
            return tensor
        host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins_outputs)
        return host.copy_(tensor, non_blocking=True)

    def to_numpy(self, tensor: Any) -> Array:
        """The host tensor as an array, which shares its memory if possible."""
        array: Array
        if tensor.dtype == self._torch.bfloat16:
            array = tensor.contiguous().view(self._torch.int16).numpy().view(NUMPY_BY_DATATYPE["BF16"])
        else:
            array = tensor.numpy()
        return array
