"""Checks of names, tensors and unsupported fields.

The rules are those of Triton Inference Server's load-time validation. An unsupported field that would change answers is
an error; one that only tunes speed or adds labels is ignored and logged.
"""

from collections.abc import Collection, MutableSequence
from pathlib import Path, PurePosixPath
from typing import Any

from weft.base.signature import EMPTY_BATCH_PARAMETER, OPTIONAL_OUTPUTS_PARAMETER, RETRY_PARAMETER, optional_outputs
from weft.base.tensors import NUMPY_BY_DATATYPE, reshape_fault
from weft.base.text.pbtxt import Diagnostic, PbtxtError, Positions, suggestion
from weft.serving.backends.base import Backend
from weft_protos.model_config_pb2 import TYPE_BF16, ModelConfig, ModelInput, ModelOutput


class ConfigReport:
    """Collects the errors of one configuration; ``positions`` of its fields are None if it is not from a file."""

    def __init__(self, file: str, positions: Positions | None = None) -> None:
        self.diagnostics: list[Diagnostic] = []
        self._file = file
        self._positions = positions

    def error(self, path: str, message: str) -> None:
        """Add an error of the field ``path``, for example ``input[0].dims[1]``; "" is the whole file."""
        self.diagnostics.append(self._diagnostic(path, message))

    def refuse(self, is_fault: object, path: str, message: str) -> None:
        """Add an error if ``is_fault``."""
        if is_fault:
            self.error(path, message)

    def fault(self, path: str, message: str) -> PbtxtError:
        """Make the error for a single fault that is found only when the model loads."""
        return PbtxtError([self._diagnostic(path, message)])

    def raise_if_any(self) -> None:
        """Raise PbtxtError with all errors, in the order of the file, if there are any."""
        if self.diagnostics:
            raise PbtxtError(sorted(self.diagnostics, key=lambda diagnostic: (diagnostic.line, diagnostic.column)))

    def _diagnostic(self, path: str, message: str) -> Diagnostic:
        line, column, source_line = 0, 0, ""
        if self._positions is not None:
            line, column = self._positions.find(path)
            source_line = self._positions.source_line(line)
        return Diagnostic(self._file, line, column, message, source_line=source_line)


BACKEND_BY_PLATFORM = {"onnxruntime_onnx": "onnxruntime", "pytorch_libtorch": "pytorch"}
#: The platform or backend of a model that names neither, by the file in its version folder; the first that is there.
_BY_FILENAME = {
    "model.onnx": "onnxruntime_onnx",
    "model.pt2": "pytorch_libtorch",
    "model.pt": "pytorch_libtorch",
    "model.py": "python",
}
#: Why nothing tells the backend.
TELLING_FILES = f"the latest version folder has none of {', '.join(_BY_FILENAME)}, which would tell the backend"
_BY_SUFFIX = {PurePosixPath(filename).suffix: name for filename, name in _BY_FILENAME.items()}

_TO_ONNX = "make an ONNX file of the model, for backend onnxruntime"
#: Backends and platforms of Triton Inference Server that are not served, with the cure.
_FOREIGN = {
    "openvino": f"an OpenVINO IR is not read; {_TO_ONNX}, or take the one that it was made of",
    "tensorrt": "a TensorRT plan fits one kind of GPU; take the ONNX file that it was built from, for backend "
    "onnxruntime",
    "tensorflow": f"{_TO_ONNX}, with tf2onnx",
    "caffe2": _TO_ONNX,
    "dali": "use backend image of the service preprocess, or a model.py",
    "vllm": "give the folder of the model to backend llm, or call a vLLM server with backend openai",
    "tensorrtllm": "give the folder of the Hugging Face model to backend llm, or call the server with backend openai",
}
#: Fields that would change answers, with the cure.
_UNSUPPORTED = {
    "ensemble_scheduling": "an ensemble is a graph: move it to the repository of the router",
    "cc_model_filenames": "one file serves every device; use default_model_filename",
    "model_operations.op_library_filename": "remove it",
    "model_repository_agents.agents": "agents are plug-ins that change a model's files at load; change them before "
    "they come into the repository, and remove it",
}

#: Backends that copy between host and GPU.
_PINNING = ("onnxruntime", "pytorch")
#: Fields that only tune speed or add labels, with the backends that heed them.
_IGNORED: dict[str, tuple[str, ...]] = {
    "runtime": (),
    "metric_tags": (),
    "model_metrics.metric_control": (),
    "optimization.graph": ("onnxruntime",),
    "optimization.execution_accelerators": ("onnxruntime",),
    "optimization.priority": (),
    "optimization.cuda": (),
    "optimization.input_pinned_memory": _PINNING,
    "optimization.output_pinned_memory": _PINNING,
    "optimization.gather_kernel_buffer_threshold": (),
    "optimization.eager_batching": (),
    "input.format": (),
    "instance_group.host_policy": (),
    "instance_group.profile": (),
}

#: Of a path inside a model's folder, which is also the most that one of its parts may have.
_MAX_PATH_BYTES = 255


def _is_set(message: Any, path: str) -> bool:
    """Whether a field is set, in any message of a repeated part of the path."""
    name, _, rest = path.partition(".")
    value, field = getattr(message, name), message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        return any(_is_set(item, rest) for item in value) if rest else bool(value)
    if field.message_type is None:
        return bool(value)
    return message.HasField(name) and (not rest or _is_set(value, rest))


def ignored_fields(config: ModelConfig) -> list[str]:
    """Fields that are set and have no effect in this version."""
    cuda = {field.name for field, _ in config.optimization.cuda.ListFields()}
    heeded = ["optimization.cuda"] if config.backend == "onnxruntime" and cuda <= {"graphs"} else []
    return [
        path
        for path, backends in _IGNORED.items()
        if config.backend not in backends and path not in heeded and _is_set(config, path)
    ]


def name_backend(config: ModelConfig, directory: Path) -> None:
    """If the model names no backend, infer it from the files in its version folder."""
    if config.backend or config.platform or config.HasField("ensemble_scheduling"):
        return
    if config.default_model_filename:
        found = _BY_SUFFIX.get(PurePosixPath(config.default_model_filename).suffix, "")
    else:
        filename = next((filename for filename in _BY_FILENAME if (directory / filename).exists()), "")
        config.default_model_filename = filename
        found = _BY_FILENAME.get(filename, "")
    if found in BACKEND_BY_PLATFORM:
        config.platform = found
    config.backend = BACKEND_BY_PLATFORM.get(found, found)


def is_incomplete(config: ModelConfig) -> bool:
    """Whether inputs or outputs, or some of their types or shapes, are missing and must come from the model's file."""
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    return not (config.input and config.output) or any(not (t.data_type and t.dims) for t in tensors)


def check_declared(config: ModelConfig, name: str, backends: Collection[str], report: ConfigReport) -> None:
    """Check everything but the tensors, and fill in ``name``, the model's folder, and ``backend`` from ``platform``."""
    _check_identity(config, name, backends, report)
    for asked, cure in _UNSUPPORTED.items():
        path = asked.removesuffix(".agents")
        report.refuse(_is_set(config, asked), path, f"{path} is not supported by this version; {cure}")
    named = [("default_model_filename", config.default_model_filename)]
    named += [(f"output[{i}].label_filename", tensor.label_filename) for i, tensor in enumerate(config.output)]
    for path, filename in named:
        fault = path_fault(filename, "the model's folder")
        report.refuse(fault, path, fault)


def check_features(config: ModelConfig, backend: type[Backend], report: ConfigReport) -> None:
    """Reject features that exclude each other, or that the backend lacks."""
    is_decoupled, is_stateful = config.model_transaction_policy.decoupled, config.HasField("sequence_batching")
    cache, ordering = "response_cache.enable", "dynamic_batching.preserve_ordering"
    if config.response_cache.enable:  # equal requests must have equal answers
        why = "for a decoupled model, which may answer often"
        report.refuse(is_decoupled, cache, f"{cache} is not possible {why}; remove it")
        why = "with sequence_batching, where answers depend on state"
        report.refuse(is_stateful, cache, f"{cache} is not possible {why}; remove it")
    _check_optional_outputs(config, report)
    _check_empty_batches(config, report)
    retry = config.parameters[RETRY_PARAMETER].string_value if RETRY_PARAMETER in config.parameters else "never"
    fault = f"parameter '{RETRY_PARAMETER}' must be once or never, got '{retry[:80]}'"
    report.refuse(retry not in ("once", "never"), f"parameters[{RETRY_PARAMETER}].string_value", fault)
    fault = f"parameter '{RETRY_PARAMETER}' cannot be once with sequence_batching, where answers depend on state"
    report.refuse(is_stateful and retry == "once", f"parameters[{RETRY_PARAMETER}].string_value", fault)
    if is_decoupled:
        path = "model_transaction_policy.decoupled"
        fault = f"backend '{config.backend}' answers each request once; remove {path}"
        report.refuse(not backend.can_stream, path, fault)
        fault = "preserve_ordering is not possible for a decoupled model; remove it"
        report.refuse(config.dynamic_batching.preserve_ordering, ordering, fault)
        if "split_large_requests" in config.parameters and config.parameters["split_large_requests"].string_value:
            fault = "split_large_requests is not possible for a decoupled model; remove it"
            report.error("parameters[split_large_requests].key", fault)
    path = "sequence_batching.iterative_sequence"
    is_fault = config.sequence_batching.iterative_sequence and not backend.can_reschedule
    report.refuse(is_fault, path, f"backend '{config.backend}' executes each request once; remove {path}")


def _check_optional_outputs(config: ModelConfig, report: ConfigReport) -> None:
    if OPTIONAL_OUTPUTS_PARAMETER not in config.parameters:
        return
    path, known = f"parameters[{OPTIONAL_OUTPUTS_PARAMETER}]", [tensor.name for tensor in config.output]
    names = optional_outputs(config)
    for name in names:
        text = f"parameter '{OPTIONAL_OUTPUTS_PARAMETER}': the model has no output '{name}'"
        report.refuse(name not in known, path, text + suggestion(name, known))
    text = f"parameter '{OPTIONAL_OUTPUTS_PARAMETER}' must name outputs, separated by commas: {', '.join(known)}"
    report.refuse(not names, path, text)


def _check_empty_batches(config: ModelConfig, report: ConfigReport) -> None:
    if EMPTY_BATCH_PARAMETER not in config.parameters:
        return
    path, value = f"parameters[{EMPTY_BATCH_PARAMETER}]", config.parameters[EMPTY_BATCH_PARAMETER].string_value
    if value not in ("", "true", "false"):
        report.error(path, f"parameter '{EMPTY_BATCH_PARAMETER}' is '{value}'; give \"true\" or \"false\", or no value")
    elif value != "false" and (config.max_batch_size <= 0 or config.HasField("sequence_batching")):
        what = "a model without batch dimension" if config.max_batch_size <= 0 else "a stateful model"
        report.error(path, f"parameter '{EMPTY_BATCH_PARAMETER}' has no effect for {what}; remove it")


def _check_identity(config: ModelConfig, name: str, backends: Collection[str], report: ConfigReport) -> None:
    if config.name and config.name != name:
        report.error(
            "name", f"name is '{config.name}', but the model's folder is '{name}'; make them equal or leave name out"
        )
    config.name = name
    if config.HasField("ensemble_scheduling"):  # reported by _check_supported
        return
    if config.platform == "ensemble":
        report.error("platform", "platform 'ensemble' is not supported here; an ensemble belongs to the router")
        return
    implied = BACKEND_BY_PLATFORM.get(config.platform, "")
    path, asked = ("backend", config.backend) if config.backend else ("platform", implied or config.platform)
    if not asked:
        report.error("", f"neither backend nor platform is set, and {TELLING_FILES}{suggestion('', sorted(backends))}")
    elif asked not in backends:
        cure = _FOREIGN.get(asked.partition("_")[0])
        report.error(
            path,
            f"{path} '{asked}' is not served by this version: {cure}"
            if cure
            else f"unknown {path} '{asked}'{suggestion(asked, sorted(backends))}",
        )
    elif implied and implied != asked:
        report.error("platform", f"platform '{config.platform}' means backend '{implied}', but backend is '{asked}'")
    config.backend = asked


def path_fault(filename: str, folder: str) -> str:
    """Return why ``filename`` is no valid path below ``folder`` (its name in messages), "" if it is."""
    num_bytes = len(filename.encode())
    if num_bytes > _MAX_PATH_BYTES:
        return f"a path of {num_bytes} bytes; at most {_MAX_PATH_BYTES} are allowed"
    path = PurePosixPath(filename)
    if path.is_absolute() or ".." in path.parts or "\0" in filename:
        return f"'{filename}' leaves {folder}; give a relative path without '..'"
    return ""


def check_tensors(config: ModelConfig, report: ConfigReport, *, may_lack: Collection[str] = ()) -> None:
    """Check ``input`` and ``output``; those in ``may_lack`` may be empty, and declarations that repeat are dropped."""
    is_complete = not report.diagnostics  # else the backend has not completed it
    kinds: tuple[tuple[str, MutableSequence[Any]], ...] = (("input", config.input), ("output", config.output))
    for kind, tensors in kinds:
        if not tensors and is_complete and kind not in may_lack:
            report.error(
                "", f"model must have at least one {kind}; backend '{config.backend}' does not name them, so declare it"
            )
        declared: dict[str, ModelInput | ModelOutput] = {}
        for i, tensor in enumerate(tensors):
            _check_tensor(kind, f"{kind}[{i}]", tensor, config.max_batch_size, report)
            if declared.setdefault(tensor.name, tensor) != tensor:
                text = f"{kind} '{tensor.name}' is declared twice, and not alike; leave one out"
                report.error(f"{kind}[{i}].name", text)
        if is_complete and len(declared) < len(tensors):  # Triton takes a declaration that is repeated
            kept = [*declared.values()]
            del tensors[:]
            tensors.extend(kept)


def _check_tensor(
    kind: str, path: str, tensor: ModelInput | ModelOutput, max_batch_size: int, report: ConfigReport
) -> None:
    called = f"{kind} '{tensor.name}'"
    report.refuse(not tensor.name, path, f"{kind} must specify 'name'")
    report.refuse(not tensor.data_type, path, f"{called} must specify 'data_type', for example TYPE_FP32")
    if tensor.data_type == TYPE_BF16 and "BF16" not in NUMPY_BY_DATATYPE:
        text = f"{called} is of type BF16, for which ml_dtypes is not installed; pip install 'weft-mesh[bf16]'"
        report.error(f"{path}.data_type", text)
    report.refuse(not tensor.dims, path, f"{called} must specify 'dims'; for one value per row use dims: [ 1 ]")
    for i, dim in enumerate(tensor.dims):
        text = f"{called} dimension must be integer >= 1, or -1 for any size, got {dim}"
        report.refuse(dim < -1 or dim == 0, f"{path}.dims[{i}]", text)
    if tensor.HasField("reshape"):
        fault = reshape_fault(tuple(tensor.dims), tuple(tensor.reshape.shape), has_batch=max_batch_size > 0)
        if fault is not None:
            report.error(f"{path}.{fault[0]}", f"{called} {fault[1]}")
    for field in ("is_shape_tensor", "is_non_linear_format_io"):
        text = f"{called}: {field} is not supported by this version; remove it"
        report.refuse(getattr(tensor, field, False), f"{path}.{field}", text)


def model_dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Dims of the model itself: ``reshape`` where that is set, else ``dims``."""
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
