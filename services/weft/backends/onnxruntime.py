"""``onnxruntime``: ONNX models on CPU or CUDA."""

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.backends.contract import FileTensor, check_file, completed
from weft.backends.gpu import PinnedPool, is_pinning_enabled, make_pinned_pool, use_cpu_instead
from weft.backends.onnx_file import OnnxFile, read_onnx
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.observing.logs import get_logger
from weft.base.repository.layout import existing_file
from weft.base.signature import ModelSignature
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.base import TensorBackend
from weft.serving.backends.layout import Allocate, is_ragged
from weft.serving.backends.loading import MissingPackageError, model_file, require
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest

_log = get_logger("weft.model")

_FILENAME = "model.onnx"
_EXTRA = "onnx"
_ERRORS_ONLY = 3
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_DATATYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip
_TOO_NEW = re.compile(r"IR version|[Oo]pset")
# optimization { graph { level } } as Triton Inference Server reads it; absent is 0.
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
#: Most input shapes that one instance captures; each keeps its tensors and its graph in device memory.
MAX_GRAPHS = 32
_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", "-1"
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class OnnxRuntimeBackend(TensorBackend):
    """Runs ``model.onnx`` (or ``default_model_filename``) of the version folder.

    A GPU instance has its own session and thus CUDA stream; operators that CUDA lacks run on the CPU. If CUDA
    does not load, an instance of KIND_AUTO runs on the CPU with a warning, and one of KIND_GPU fails to load. Inputs
    are gathered in pinned memory, unless ``optimization { input_pinned_memory { enable: false } }``; outputs of known
    shape are copied to pinned memory, unless ``output_pinned_memory`` disables it. Models with strings use neither.
    The parameters of the ``gpu_execution_accelerator`` named ``cuda`` go to the CUDA provider; ``enable_cuda_graph``
    among them, or ``optimization { cuda { graphs: true } }``, captures each set of shapes as a CUDA graph, if every
    output has fixed dims.

    ``optimization { graph { level } }`` is -1 (basic), 1 (extended) or 2 (none); unset is all. Strings must be UTF-8,
    else the request is INVALID_ARGUMENT; so are values that an operator rejects, for example an index that is out
    of bounds.

    Parameters (all optional):
        intra_op_thread_count: Threads inside an operator. 0: one per core. Default 1, because instances, services and
            other models share the machine, and waiting threads spin: MiniLM with 32 tokens on 2 cores shared with other
            work answered 196 requests/s with 1 thread, 100 with 2. For throughput raise ``instance_group``.
        inter_op_thread_count: Threads across operators, if ``execution_mode`` is 1. 0: one per core. Default 1.
        execution_mode: 0 runs operators one after another, 1 in parallel. Default 0.
        enable_mem_arena, enable_mem_pattern: Memory planning of ONNX Runtime. Default true.

    Not supported by this version: BF16 tensors, other accelerators than CUDA.
    """

    def check(self) -> None:
        """Compare the configuration with the file, of which ONNX Runtime, if installed, gets all but the weights."""
        self._providers()
        self._read_parameters()
        path = model_file(self.model, _FILENAME)
        self._check_tensors(path, *_file_tensors(path, has_header_only=self.instance.kind == "GPU"))
        require("onnxruntime", _EXTRA)

    def load(self) -> None:
        """Open the session and validate it against the configuration."""
        providers = self._providers()
        self._bound: BoundSession | None = None
        self._pool: PinnedPool | None = None
        self._read_parameters()
        path = model_file(self.model, _FILENAME)
        ort = require("onnxruntime", _EXTRA)
        if self.instance.kind == "GPU":
            with contextlib.redirect_stdout(sys.stderr):  # it prints, and standard output belongs to the service
                ort.preload_dlls()  # CUDA libraries that pip installed are not on the loader's path
            if _CUDA not in ort.get_available_providers():  # built for CPUs
                providers = [_CPU]
        self._session = _open(ort, path, self._options(ort), providers)
        is_on_gpu = self._session.get_providers()[0] != _CPU
        if self.instance.kind == "GPU" and not is_on_gpu:
            use_cpu_instead(
                self.instance,
                "ONNX Runtime cannot load CUDA here; install onnxruntime-gpu without onnxruntime, CUDA and cuDNN",
            )
        signature = self._check_tensors(path, *_session_tensors(self._session))
        self._refusal = ort.capi.onnxruntime_pybind11_state.InvalidArgument
        self._strings = [spec.name for spec in signature.inputs if spec.datatype == "BYTES"]
        self._outputs = [spec.name for spec in signature.outputs]
        has_strings = any(spec.datatype == "BYTES" for spec in (*signature.inputs, *signature.outputs))
        if is_on_gpu and not has_strings:
            self._bind(ort, signature, ("cuda", self.instance.device_id))
        elif is_on_gpu and self._captures:
            raise InvalidArgumentError(
                f"model '{signature.name}': a model with BYTES tensors cannot be captured as a CUDA graph; remove "
                "enable_cuda_graph or optimization.cuda.graphs"
            )

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The inputs; strings as ``str``, which ONNX Runtime requires."""
        inputs = super().prepare(request)
        for name in self._strings:
            if name in inputs:
                inputs[name] = _decoded(name, inputs[name])
        return inputs

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Run the session; releases the GIL."""
        try:
            if self._bound is not None:
                return self._bound.run(inputs, num_rows)
            return dict(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))
        except self._refusal as error:
            raise InvalidArgumentError(f"the model cannot take the values of the inputs: {error}") from error

    def can_share_processor(self) -> bool:
        """True on the CPU without ONNX Runtime's own threads, which all executions would share."""
        return self._bound is None and self._is_single_threaded and self.instance.kind == "CPU"

    def close(self) -> None:
        """Free the session and its pinned memory."""
        del self._session, self._bound
        if self._pool is not None:
            self._pool.close()

    @staticmethod
    def auto_complete(  # type: ignore[override]  # mypy takes the base's for a method
        config: dict[str, Any], directory: Path
    ) -> dict[str, Any]:
        """Fill in inputs, outputs and possibly the batch size from the file."""
        path = existing_file(directory, config.get("default_model_filename") or _FILENAME)
        inputs, _, outputs = _file_tensors(path)
        return completed(config, path, inputs, outputs)

    def _check_tensors(
        self, path: Path, inputs: list[FileTensor], defaults: list[FileTensor], outputs: list[FileTensor]
    ) -> ModelSignature:
        """Compare the configuration with the tensors of the file; returns the signature of the file."""
        may_be_absent = {tensor.name for tensor in defaults}
        return check_file(self.model, path, [*inputs, *defaults], outputs, may_be_absent=may_be_absent)

    def _bind(self, ort: Any, signature: ModelSignature, device: tuple[str, int]) -> None:
        """Run with bound, preallocated memory from now on."""
        self._pool = make_pinned_pool(self.instance)
        pinned = self._pool.empty if self._pool else np.empty
        is_pinned = {way: is_pinning_enabled(self.model.config, way) for way in ("input", "output")}
        has_rows = not is_ragged(signature, self.model.layout)
        outputs = {
            spec.name: BoundOutput(
                np.dtype(NUMPY_BY_DATATYPE[spec.datatype]), spec.dims if has_rows and -1 not in spec.dims else None
            )
            for spec in signature.outputs
        }
        varying = [name for name, output in outputs.items() if output.dims is None]
        if self._captures and varying:
            _log.warning(
                "model '%s' runs without CUDA graphs, which need outputs of fixed dims: '%s' has none",
                signature.name,
                varying[0],
            )
        self._bound = BoundSession(
            ort,
            self._session,
            device,
            outputs,
            has_rows=signature.max_batch_size > 0,
            allocate=pinned if is_pinned["output"] else np.empty,
            captures=self._captures,
        )
        self.gather_into(pinned if is_pinned["input"] else np.empty)

    def _read_parameters(self) -> None:
        parameters = ParameterReader(self.model)
        self._thread_counts = [
            parameters.integer(f"{where}_op_thread_count", 1, minimum=0) for where in ("intra", "inter")
        ]
        self._is_parallel = parameters.integer("execution_mode", 0, minimum=0, maximum=1) == 1
        self._is_single_threaded = self._thread_counts[0] == 1 and not self._is_parallel
        self._memory = [parameters.flag(f"enable_mem_{part}", True) for part in ("arena", "pattern")]
        parameters.finish_leniently()  # Triton Inference Server has more, and ignores any other
        level = int(_optimization(self.model.config).get("graph", {}).get("level", 0))
        if level not in _GRAPH_LEVELS:
            path = "optimization.graph.level"
            raise self.model.error(path, f"{path} must be -1, 0, 1 or 2, got {level}")
        self._graph_level = _GRAPH_LEVELS[level]

    def _options(self, ort: Any) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.intra_op_num_threads, options.inter_op_num_threads = self._thread_counts
        mode = "ORT_PARALLEL" if self._is_parallel else "ORT_SEQUENTIAL"
        options.execution_mode = getattr(ort.ExecutionMode, mode)
        options.enable_cpu_mem_arena, options.enable_mem_pattern = self._memory
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, self._graph_level)
        return options

    def _providers(self) -> list[Any]:
        accelerators = _optimization(self.model.config).get("execution_accelerators", {})
        cuda_options: dict[str, str] = {}
        for device in ("gpu", "cpu"):
            for accelerator in accelerators.get(f"{device}_execution_accelerator", ()):
                if (device, accelerator.get("name")) != ("gpu", "cuda"):
                    raise UnsupportedError(
                        f"model '{self.model.signature.name}': {device}_execution_accelerator "
                        f"'{accelerator.get('name')}' is not supported by this version; use the "
                        "gpu_execution_accelerator 'cuda' or none"
                    )
                cuda_options |= accelerator.get("parameters", {})
        if _optimization(self.model.config).get("cuda", {}).get("graphs"):
            cuda_options.setdefault("enable_cuda_graph", "1")
        self._captures = cuda_options.get("enable_cuda_graph", "0").lower() in ("1", "true")
        if self.instance.kind != "GPU":
            return [_CPU]
        cuda_options["device_id"] = str(self.instance.device_id)
        return [(_CUDA, cuda_options), _CPU]


def _open(ort: Any, path: Path, options: Any, providers: list[Any]) -> Any:
    try:
        return ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions share no base of their own
        fault = _read(path)[1] or str(error)
        if _TOO_NEW.search(fault):
            fault += f"; export the model with a lower opset, or install a newer onnxruntime than {ort.__version__}"
        raise InvalidArgumentError(f"ONNX Runtime cannot load {path}: {fault}") from error


def _read(path: Path) -> tuple[OnnxFile | None, str]:
    """The header of a file, and why it cannot be loaded, if it tells."""
    try:
        found = read_onnx(path)
        return found, found.fault
    except (ValueError, OSError) as error:
        return None, str(error)


_Tensors = tuple[list[FileTensor], list[FileTensor], list[FileTensor]]


def _file_tensors(path: Path, *, has_header_only: bool = False) -> _Tensors:
    """Inputs, those with a default, and outputs of a file, without reading its weights.

    ONNX Runtime tells, if installed; for a GPU, whose operators may differ, the header. Raises InvalidArgumentError.
    """
    found, fault = _read(path)
    if not has_header_only:
        with contextlib.suppress(MissingPackageError):
            ort = require("onnxruntime", _EXTRA)
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.intra_op_num_threads, options.log_severity_level = 1, _ERRORS_ONLY
            if found is not None and not fault:
                with contextlib.suppress(Exception):  # the whole file then tells what is wrong
                    session = ort.InferenceSession(found.skeleton, options, providers=[_CPU])
                    inputs, _, outputs = _session_tensors(session)
                    return [i for i in inputs if i.name not in found.left_out], found.defaults, outputs
            return _session_tensors(_open(ort, path, options, [_CPU]))
    if found is None or fault:
        raise InvalidArgumentError(f"{path}: {fault}")
    return found.inputs, found.defaults, found.outputs


def _session_tensors(session: Any) -> _Tensors:
    return (
        _tensors(session.get_inputs()),
        _tensors(session.get_overridable_initializers()),
        _tensors(session.get_outputs()),
    )


def _tensors(nodes: Iterable[Any]) -> list[FileTensor]:
    """Tensors of a session; symbolic dimensions are -1. ONNX Runtime reports an unknown shape like that of a scalar."""
    return [
        FileTensor(
            node.name,
            _DATATYPES.get(node.type, node.type),
            tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape) or None,
        )
        for node in nodes
    ]


def _decoded(name: str, array: Array) -> Array:
    texts = np.empty(array.shape, np.object_)
    for index, element in np.ndenumerate(array):
        try:
            texts[index] = element.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"input '{name}' element {list(index)} is not UTF-8: {error.reason} at byte {error.start} of "
                f"{len(element)}"
            ) from None
    return texts


def _optimization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    optimization: Mapping[str, Any] = config.get("optimization", {})
    return optimization


class BoundOutput(NamedTuple):
    """A requested output; its shape without the batch dimension is None if it is unknown before the session has run."""

    dtype: "np.dtype[Any]"
    dims: tuple[int, ...] | None


class BoundSession:
    """Runs a session with one copy per tensor between host and device, and none on the host.

    An output of known shape is written into an array of ``allocate``; any other stays on the device until it is copied
    to the host as a whole. Not thread-safe.

    Args:
        session: A session without string inputs or outputs.
        device: ``("cuda", 0)``, or ``("cpu", 0)``.
        has_rows: Whether the first dimension of every tensor is the batch dimension.
        allocate: Creates arrays that the device can write to.
        captures: Whether runs are captured as a CUDA graph per set of shapes; the session has ``enable_cuda_graph``.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        device: tuple[str, int],
        outputs: Mapping[str, BoundOutput],
        *,
        has_rows: bool,
        allocate: Allocate,
        captures: bool = False,
    ) -> None:
        self._ort = ort
        self._session = session
        self._device = device
        self._outputs = outputs
        self._has_rows = has_rows
        self._allocate = allocate
        self._captures = captures and all(output.dims is not None for output in outputs.values())
        self._captured: dict[_Shapes, _Captured] = {}
        self._options = ort.RunOptions()
        if captures:
            self._options.add_run_config_entry(_GRAPH_ID, _NO_GRAPH)

    def run(self, inputs: Mapping[str, Array], num_rows: int) -> dict[str, Array]:
        """Run on contiguous inputs; outputs are in host memory. Releases the GIL while the session runs."""
        if self._captures:
            shapes = tuple((name, array.shape) for name, array in inputs.items())
            captured = self._captured.get(shapes)
            if captured is None and len(self._captured) < MAX_GRAPHS:
                captured = self._captured[shapes] = self._bind_for_capture(inputs, num_rows)
            if captured is not None:
                return captured.run(self._session, inputs)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)  # the session copies it to its device
        arrays: dict[str, Array] = {}
        for name, output in self._outputs.items():
            if output.dims is None:
                binding.bind_output(name, *self._device)
            else:
                array = arrays[name] = self._allocate(self._shape(output.dims, num_rows), output.dtype)
                binding.bind_output(name, "cpu", 0, output.dtype.type, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding, self._options)
        binding.synchronize_outputs()
        values = binding.get_outputs()  # in the order in which they were bound
        return {
            name: arrays[name] if name in arrays else _on_host(value)
            for name, value in zip(self._outputs, values, strict=True)
        }

    def _bind_for_capture(self, inputs: Mapping[str, Array], num_rows: int) -> "_Captured":
        make = self._ort.OrtValue.ortvalue_from_shape_and_type
        binding = self._session.io_binding()
        sources = {name: make(array.shape, array.dtype.type, *self._device) for name, array in inputs.items()}
        results = {
            name: make(self._shape(output.dims or (), num_rows), output.dtype.type, *self._device)
            for name, output in self._outputs.items()
        }
        for name, value in sources.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in results.items():
            binding.bind_ortvalue_output(name, value)
        options = self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(len(self._captured) + 1))
        return _Captured(binding, options, sources, results)

    def _shape(self, dims: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        return (num_rows, *dims) if self._has_rows else dims


class _Captured(NamedTuple):
    """Tensors at fixed addresses, as a captured graph requires."""

    binding: Any
    options: Any
    sources: Mapping[str, Any]
    results: Mapping[str, Any]

    def run(self, session: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name, array in inputs.items():
            self.sources[name].update_inplace(array)
        session.run_with_iobinding(self.binding, self.options)
        self.binding.synchronize_outputs()
        return {name: _on_host(value) for name, value in self.results.items()}


def _on_host(value: Any) -> Array:
    """Copy the tensor into memory of its own; for one on the host, ONNX Runtime returns a view."""
    array: Array = value.numpy()
    return array if array.flags.owndata else array.copy()
