"""``pytorch``: programs of ``torch.export`` on CPU or CUDA."""

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weft_common.errors import InvalidArgumentError, UnavailableError
from weft_common.tensors import NUMPY_BY_DATATYPE, Array
from weft_model.backends.contract import FileTensor, check_inputs, check_outputs
from weft_model.backends.pt2 import load_program
from weft_serving.backends.base import TensorBackend
from weft_serving.backends.layout import file_signature
from weft_serving.backends.loading import model_file, require
from weft_serving.backends.parameters import ParameterReader

_NUMBERED = re.compile(r".+__(\d+)")
_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16",
}  # fmt: skip


class _Threads:
    """The number of threads of torch, of which a process has one."""

    lock = threading.Lock()
    asked_for: int | None = None


class PyTorchBackend(TensorBackend):
    """Runs ``model.pt2`` (or ``default_model_filename``) of the version folder, a file of ``torch.export.save``.

    Tensors are matched by name, if every declared input is an argument of the exported module (and every declared
    output a key of the dict that it returns); else by number, if the names end in ``__0``, ``__1``, ...; else in the
    order declared. With ``max_batch_size`` the first dimension of every tensor must have been exported as dynamic. The
    program runs in inference mode, on the instance's GPU or on the CPU. TorchScript and pickled modules are refused.

    Parameters (all optional):
        INTRA_OP_THREAD_COUNT: Threads inside an operator, on CPU. Holds for the whole process: the model that is loaded
            last and sets it decides. Default 1 as long as no model sets it.

    Shapes that the configuration lets in and the exported program does not are INVALID_ARGUMENT.
    """

    def load(self) -> None:
        """Load the program, move it to the device and hold it against the configuration."""
        self._torch = torch = require("torch", "model")
        parameters = ParameterReader(self.model)
        self._set_threads(parameters.integer("INTRA_OP_THREAD_COUNT", 0, minimum=0))
        parameters.finish()
        self._device = self._place()
        path = model_file(self.model, "model.pt2")
        program = load_program(torch, path)
        self._check_program(program, path)
        if self._device.type == "cuda":
            program = require("torch.export.passes", "model").move_to_device_pass(program, str(self._device))
        self._spec = program.call_spec.in_spec
        self._module = program.module()

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Run the program; the interpreter lock is free inside its operators."""
        tensors = [self._tensor(inputs[name]) for name in self._inputs]
        args, kwargs = self._spec.unflatten(tensors)
        with self._torch.inference_mode():
            try:
                results = self._module(*args, **kwargs)
            except AssertionError as error:  # the guards of the exported program
                raise InvalidArgumentError(
                    f"the shapes of the inputs do not fit the exported program: {error}"
                ) from error
            leaves = self._torch.utils._pytree.tree_leaves(results)
            return {name: self._array(leaves[position]) for name, position in self._outputs.items()}

    def close(self) -> None:
        """Free the program."""
        del self._module

    def _place(self) -> Any:
        """The device of the instance."""
        torch, index = self._torch, self.instance.device_id
        if self.instance.kind != "GPU":
            return torch.device("cpu")
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UnavailableError(
                f"instance '{self.instance.name}' asks for GPU {index}, but torch {torch.__version__} sees "
                f"{torch.cuda.device_count()} CUDA devices; install a CUDA build of torch, or use KIND_CPU"
            )
        return torch.device("cuda", index)

    def _set_threads(self, asked_for: int) -> None:
        with _Threads.lock:
            _Threads.asked_for = asked_for or _Threads.asked_for
            self._torch.set_num_threads(_Threads.asked_for or 1)

    def _check_program(self, program: Any, path: Any) -> None:
        """Match the declared tensors with those of the program, and check them."""
        signature = file_signature(self.model.signature, self.model.layout)
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        arguments = program.graph_signature.user_inputs
        results = program.graph_signature.user_outputs
        if not all(isinstance(values.get(name), self._torch.Tensor) for name in (*arguments, *results)):
            raise InvalidArgumentError(f"{path}: every argument and result of the exported module must be a tensor")
        if len(signature.inputs) != len(arguments):
            raise InvalidArgumentError(
                f"model '{signature.name}': {path} takes {len(arguments)} inputs ({', '.join(arguments)}), the "
                f"configuration declares {len(signature.inputs)}"
            )
        names = program.module_call_graph[0].signature.forward_arg_names or ()
        names = names if len(names) == len(arguments) else arguments
        inputs = _positions([i.name for i in signature.inputs], names, len(arguments))
        out_spec = program.call_spec.out_spec
        keys = out_spec.context if out_spec.type is dict and len(out_spec.context) == len(results) else ()
        self._outputs = _positions([o.name for o in signature.outputs], keys, len(results))
        check_inputs(signature, path, [_found(name, values[arguments[i]]) for name, i in inputs.items()])
        check_outputs(
            signature,
            path,
            [_found(name, values[results[i]]) for name, i in self._outputs.items() if i < len(results)],
        )
        self._inputs = sorted(inputs, key=inputs.__getitem__)
        if signature.max_batch_size > 0:
            for name in arguments:
                limits = program.range_constraints.get(values[name].shape[0].node.expr)
                if limits is not None and limits.upper < signature.max_batch_size:
                    raise InvalidArgumentError(
                        f"model '{signature.name}': max_batch_size is {signature.max_batch_size}, but {path} was "
                        f"exported for batches of at most {limits.upper}"
                    )

    def _tensor(self, array: Array) -> Any:
        """The array on the device; bfloat16, which torch does not take from numpy, by its bits."""
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        if array.dtype == NUMPY_BY_DATATYPE["BF16"]:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16).to(self._device)
        return self._torch.from_numpy(array).to(self._device)

    def _array(self, tensor: Any) -> Array:
        tensor = tensor.detach().cpu()
        if tensor.dtype == self._torch.bfloat16:
            bits: Array = tensor.contiguous().view(self._torch.int16).numpy()
            return bits.view(NUMPY_BY_DATATYPE["BF16"])
        array: Array = tensor.numpy()
        return array


def _positions(declared: Sequence[str], names: Sequence[str], count: int) -> Mapping[str, int]:
    """Position among the ``count`` tensors of the program, for each declared one: by name, by number, or in order."""
    if set(declared) <= set(names):
        return {name: list(names).index(name) for name in declared}
    numbers = [int(match[1]) for match in map(_NUMBERED.fullmatch, declared) if match]
    if len(set(numbers)) == len(declared) and max(numbers) < count:
        return dict(zip(declared, numbers, strict=True))
    return {name: position for position, name in enumerate(declared)}


def _found(name: str, value: Any) -> FileTensor:
    datatype = str(value.dtype).removeprefix("torch.")
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return FileTensor(name, _DATATYPES.get(datatype, datatype), shape)
