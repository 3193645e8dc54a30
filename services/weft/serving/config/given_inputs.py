"""The inputs that ``sequence_batching`` adds: control inputs and implicit state, checked."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.reshape import reshaped
from weft.base.signature import TensorSpec, datatype_name
from weft.base.tensors import ITEMSIZE_BYTES, NUMPY_BY_DATATYPE, WireTensor, encode, encode_bytes, num_elements
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import Backend, Batch
from weft.serving.backends.sequences import ImplicitState, SequenceInputs, Signal
from weft.serving.config.checks import ConfigReport, model_dims, path_fault
from weft.serving.request.request import InferenceRequest
from weft_protos.model_config_pb2 import ModelConfig, ModelInput, ModelSequenceBatching, ModelWarmup

_PATH = "sequence_batching"
_FLAGS = (("int32_false_true", "INT32"), ("fp32_false_true", "FP32"), ("bool_false_true", "BOOL"))
_ID_DATATYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
#: Of the initial state of a sequence.
MAX_STATE_BYTES = 1 << 30
_EMPTY_STRING_BYTES = 4


def drop_added(config: ModelConfig, declared: Collection[str]) -> None:
    """Remove the inputs and outputs of the model's file that the server adds and keeps: clients do not see them.

    The ``declared`` ones, which the configuration had before a backend completed it, stay.
    """
    batching = config.sequence_batching
    given = {*(c.name for c in batching.control_input), *(state.input_name for state in batching.state)}
    kept = {state.output_name for state in batching.state}
    for tensors, names in ((config.input, given - {*declared}), (config.output, kept - {*declared})):
        for i in reversed(range(len(tensors))):
            if tensors[i].name in names:
                del tensors[i]


def sequence_inputs(config: ModelConfig, directory: Path, report: ConfigReport) -> SequenceInputs | None:
    """The inputs and states that the server adds; None without ``sequence_batching``.

    ``data_file`` names a file in the subfolder ``initial_state`` of ``directory``, the model's folder.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching, has_batch = config.sequence_batching, config.max_batch_size > 0
    _check_names(config, report)
    for i, warmup in enumerate(config.model_warmup):
        if warmup.batch_size > 1:
            report.error(
                f"model_warmup[{i}].batch_size",
                f"sequence_batching takes one row at a time; batch_size must be 1, got {warmup.batch_size}",
            )
    if config.model_transaction_policy.decoupled and batching.state:
        report.error(f"{_PATH}.state", "state is not possible for a decoupled model; keep it in the model")
    signals: list[Signal] = []
    id_spec: TensorSpec | None = None
    kinds: set[str] = set()
    for path, name, control in _controls(batching):
        kind = _kind(control)
        if kind in kinds:
            report.error(path, f"sequence batching specifies multiple CONTROL_SEQUENCE_{kind} tensors, '{name}' is one")
        kinds.add(kind)
        if kind == "CORRID":
            id_spec = _id_spec(path, name, control, report)
        elif (signal := _signal(path, name, control, has_batch, report)) is not None:
            signals.append(signal)
    states = [
        state
        for i, message in enumerate(batching.state)
        if (state := _state(f"{_PATH}.state[{i}]", message, config, directory, report)) is not None
    ]
    is_direct = batching.WhichOneof("strategy_choice") != "oldest"
    return SequenceInputs(is_direct and has_batch, tuple(signals), id_spec, tuple(states))


def id_datatype(batching: ModelSequenceBatching) -> str:
    """Datatype of the input that gets the id of the sequence; "" if there is none."""
    for _, _, control in _controls(batching):
        if _kind(control) == "CORRID":
            return datatype_name(control.data_type)
    return ""


def _controls(
    batching: ModelSequenceBatching,
) -> Iterator[tuple[str, str, ModelSequenceBatching.Control]]:
    for i, control_input in enumerate(batching.control_input):
        for j, control in enumerate(control_input.control):
            yield f"{_PATH}.control_input[{i}].control[{j}]", control_input.name, control


def _kind(control: ModelSequenceBatching.Control) -> str:
    return ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix("CONTROL_SEQUENCE_")


def _check_names(config: ModelConfig, report: ConfigReport) -> None:
    batching = config.sequence_batching
    inputs = {tensor.name for tensor in config.input}
    named = [
        *((f"{_PATH}.control_input[{i}].name", "control input", c.name) for i, c in enumerate(batching.control_input)),
        *(
            (f"{_PATH}.state[{i}].input_name", "state input", state.input_name)
            for i, state in enumerate(batching.state)
        ),
    ]
    for path, called, name in named:
        if not name:
            report.error(path, f"sequence batching {called} must specify a name")
        elif name in inputs:
            report.error(
                path,
                f"sequence batching {called} '{name}' is an input already; the server gives it, so declare it once",
            )
        inputs.add(name)
    for i, control_input in enumerate(batching.control_input):
        if len(control_input.control) != 1:
            report.error(
                f"{_PATH}.control_input[{i}]",
                f"control input '{control_input.name}' must have one control, got {len(control_input.control)}",
            )


def _id_spec(path: str, name: str, control: ModelSequenceBatching.Control, report: ConfigReport) -> TensorSpec:
    datatype = datatype_name(control.data_type)
    if datatype not in _ID_DATATYPES:
        report.error(
            path,
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID of '{name}': must be TYPE_UINT64, TYPE_INT64, "
            f"TYPE_UINT32, TYPE_INT32 or TYPE_STRING, got {datatype}",
        )
    if any(getattr(control, field) for field, _ in _FLAGS):
        report.error(path, f"control CONTROL_SEQUENCE_CORRID of '{name}' has a data_type, and no false and true values")
    return TensorSpec(name, datatype, (1,))


def _signal(
    path: str, name: str, control: ModelSequenceBatching.Control, has_batch: bool, report: ConfigReport
) -> Signal | None:
    given = [(field, datatype) for field, datatype in _FLAGS if getattr(control, field)]
    if len(given) != 1:
        report.error(
            path,
            f"sequence batching control '{name}' must specify exactly one of "
            f"{', '.join(field for field, _ in _FLAGS)}, got {len(given)}",
        )
        return None
    field, datatype = given[0]
    pair = list(getattr(control, field))
    if len(pair) != 2:
        report.error(
            path,
            f"sequence batching control '{field}' must have exactly 2 entries for CONTROL_SEQUENCE_{_kind(control)}, "
            f"got {len(pair)}",
        )
        return None
    shape = (1, 1) if has_batch else (1,)
    no, yes = (encode(np.full(shape, value, NUMPY_BY_DATATYPE[datatype])) for value in pair)
    return Signal(TensorSpec(name, datatype, (1,)), _kind(control), (no, yes))


def _state(
    path: str, message: ModelSequenceBatching.State, config: ModelConfig, directory: Path, report: ConfigReport
) -> ImplicitState | None:
    name, datatype, dims = message.input_name, datatype_name(message.data_type), tuple(message.dims)
    num_faults = len(report.diagnostics)
    if not message.output_name:
        report.error(path, f"state '{name}' must specify output_name, the output that the next request gets")
    if datatype == "INVALID":
        report.error(path, f"state '{name}' must specify 'data_type', for example TYPE_FP32")
    if any(dim < -1 or dim == 0 for dim in dims):
        report.error(path, f"dims of state '{name}' must be at least 1, or -1 for any size, got {list(dims)}")
    if message.use_growable_memory and not message.use_same_buffer_for_input_output:
        report.error(
            f"{path}.use_growable_memory",
            f"state '{name}': use_growable_memory needs use_same_buffer_for_input_output; set it to true, or remove "
            "use_growable_memory",
        )
    output = next((tensor for tensor in config.output if tensor.name == message.output_name), None)
    if output is not None and (datatype_name(output.data_type), model_dims(output)) != (datatype, dims):
        report.error(
            path,
            f"state '{name}' is {datatype} {list(dims)}, but output '{output.name}', which it is, is "
            f"{datatype_name(output.data_type)} {list(model_dims(output))}",
        )
    if len(report.diagnostics) > num_faults:
        return None
    initial = _initial(path, message, dims, datatype, directory, report)
    if initial is None:
        return None
    shape = (1, *initial.shape) if config.max_batch_size > 0 else initial.shape
    return ImplicitState(
        TensorSpec(name, datatype, dims), message.output_name, initial._replace(shape=shape), output is not None
    )


def _initial(
    path: str,
    message: ModelSequenceBatching.State,
    dims: tuple[int, ...],
    datatype: str,
    directory: Path,
    report: ConfigReport,
) -> WireTensor | None:
    """The state of a sequence that starts, without batch dimension; None with a fault. A -1 without a size is 1."""
    filled = tuple(max(dim, 1) for dim in dims)
    if not message.initial_state:
        return _zeros(path, message.input_name, datatype, filled, report)
    path, initial = f"{path}.initial_state[0]", message.initial_state[0]
    if len(message.initial_state) > 1:
        report.error(
            path, f"state '{message.input_name}' must have one initial_state, got {len(message.initial_state)}"
        )
        return None
    shape = tuple(initial.dims)
    fits = len(shape) == len(dims) and all(got > 0 and want in (-1, got) for got, want in zip(shape, dims, strict=True))
    if datatype_name(initial.data_type) != datatype or not fits:
        report.error(
            path,
            f"initial_state of '{message.input_name}' is {datatype_name(initial.data_type)} {list(shape)}, but the "
            f"state is {datatype} {list(dims)}; each dimension must be at least 1",
        )
        return None
    kind = initial.WhichOneof("state_data")
    if kind == "zero_data":
        return _zeros(path, message.input_name, datatype, shape, report)
    if kind != "data_file":
        report.error(path, f"initial_state of '{message.input_name}' must specify zero_data or data_file")
        return None
    data = _file_data(path, initial.data_file, directory / "initial_state", report)
    if data is None:
        return None
    if datatype != "BYTES" and len(data) != (expected := num_elements(shape) * ITEMSIZE_BYTES[datatype]):
        report.error(path, f"initial_state/{initial.data_file} has {len(data)} bytes, expected {expected}")
        return None
    return WireTensor(datatype, shape, data)


def _zeros(path: str, name: str, datatype: str, shape: tuple[int, ...], report: ConfigReport) -> WireTensor | None:
    count = num_elements(shape)
    num_bytes = count * ITEMSIZE_BYTES.get(datatype, _EMPTY_STRING_BYTES)
    if num_bytes > MAX_STATE_BYTES:
        report.error(path, f"state '{name}' has {num_bytes} bytes; at most {MAX_STATE_BYTES} are allowed")
        return None
    return WireTensor(datatype, shape, encode_bytes([b""] * count) if datatype == "BYTES" else bytes(num_bytes))


def _file_data(path: str, filename: str, folder: Path, report: ConfigReport) -> bytes | None:
    if fault := path_fault(filename, "the folder 'initial_state'"):
        report.error(path, fault)
        return None
    try:
        return (folder / filename).read_bytes()
    except OSError as error:
        near = suggestion(filename, [entry.name for entry in folder.glob("*")])
        report.error(path, f"cannot read {folder / filename}: {error.strerror}{near}")
        return None


#: Of one input of a sample.
MAX_BYTES = 1 << 30
_SEED = 0
_STRING = b"warm-up"
_STRING_BYTES = 4 + len(_STRING)


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample request: inputs by name, batch dimension included, its batch size and its number of runs."""

    name: str
    inputs: Mapping[str, WireTensor]
    num_rows: int
    num_runs: int


def warmed(backend: type[Backend], samples: Sequence[WarmupSample]) -> type[Backend]:
    """``backend`` with a ``load`` that also runs the samples; a sample that fails fails the load."""

    class WarmedBackend(backend):  # type: ignore[valid-type,misc]  # the base is a value here
        def load(self) -> None:
            super().load()
            for sample in samples:
                for _ in range(sample.num_runs):
                    self._warm(sample)

        def _warm(self, sample: WarmupSample) -> None:
            call = InferCall(self.model.signature.name, inputs=dict(sample.inputs))
            (outcome,) = self.execute(Batch([InferenceRequest(call, CallContext(), num_rows=sample.num_rows)]))
            if isinstance(outcome, WeftError):
                raise outcome.with_message(f"warm-up sample '{sample.name}' failed: {outcome.message}")

    WarmedBackend.__name__ = WarmedBackend.__qualname__ = backend.__name__
    return WarmedBackend


def warmup_samples(config: ModelConfig, directory: Path, report: ConfigReport) -> list[WarmupSample]:
    """Samples that every instance runs before the model is ready; one with a fault is left out.

    ``input_data_file`` names a file in the subfolder ``warmup`` of ``directory``, the model's folder.
    """
    samples = []
    for i, warmup in enumerate(config.model_warmup):
        path = f"model_warmup[{i}]"
        num_faults = len(report.diagnostics)
        _check_sample(path, config, warmup, report)
        tensors = {
            tensor.name: _tensor(path, tensor, warmup, config.max_batch_size > 0, directory, report)
            for tensor in config.input
            if tensor.name in warmup.inputs
        }
        if len(report.diagnostics) == num_faults:
            inputs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            samples.append(WarmupSample(warmup.name or str(i), inputs, max(warmup.batch_size, 1), max(warmup.count, 1)))
    return samples


def _check_sample(path: str, config: ModelConfig, warmup: ModelWarmup, report: ConfigReport) -> None:
    largest = max(config.max_batch_size, 1)
    if not 1 <= warmup.batch_size <= largest:
        report.error(
            f"{path}.batch_size", f"warm-up batch_size must be between 1 and {largest}, got {warmup.batch_size}"
        )
    known = [tensor.name for tensor in config.input]
    for name in sorted(set(warmup.inputs) - set(known)):
        report.error(f"{path}.inputs[{name}]", f"the model has no input '{name}'{suggestion(name, known)}")
    for tensor in config.input:
        if not tensor.optional and tensor.name not in warmup.inputs:
            report.error(path, f"the warm-up lacks input '{tensor.name}', which the model needs")


def _tensor(
    path: str, tensor: ModelInput, warmup: ModelWarmup, has_batch: bool, directory: Path, report: ConfigReport
) -> WireTensor | None:
    data = warmup.inputs[tensor.name]
    dims = tuple(data.dims)
    datatype = datatype_name(data.data_type)
    called = f"warm-up input '{tensor.name}'"
    fits = len(dims) == len(tensor.dims) and all(
        dim > 0 and want in (-1, dim) for dim, want in zip(dims, tensor.dims, strict=True)
    )
    if data.data_type != tensor.data_type or not fits:
        report.error(
            f"{path}.inputs[{tensor.name}]",
            f"{called} has {datatype} {list(dims)}, but the model takes {datatype_name(tensor.data_type)} "
            f"{list(tensor.dims)}, each dimension at least 1",
        )
        return None
    num_bytes = max(warmup.batch_size, 1) * num_elements(dims) * ITEMSIZE_BYTES.get(datatype, _STRING_BYTES)
    if num_bytes > MAX_BYTES:
        report.error(
            f"{path}.inputs[{tensor.name}]", f"{called} has {num_bytes} bytes; at most {MAX_BYTES} are allowed"
        )
        return None
    try:
        row = _row(datatype, dims, data, directory)
    except ValueError as error:
        report.error(f"{path}.inputs[{tensor.name}]", f"{called}: {error}")
        return None
    shape = reshaped(dims, tensor.dims, model_dims(tensor))
    if not has_batch:
        return WireTensor(datatype, shape, row)
    return WireTensor(datatype, (warmup.batch_size, *shape), row * warmup.batch_size)


def _row(datatype: str, dims: tuple[int, ...], data: ModelWarmup.Input, directory: Path) -> bytes:
    kind = data.WhichOneof("input_data_type")
    count = num_elements(dims)
    if kind == "input_data_file":
        return _file_row(datatype, count, data.input_data_file, directory / "warmup")
    if kind not in ("zero_data", "random_data"):
        raise ValueError("set one of zero_data, random_data and input_data_file")
    if datatype == "BYTES":
        return encode_bytes([b"" if kind == "zero_data" else _STRING] * count)
    if kind == "zero_data":
        return bytes(count * ITEMSIZE_BYTES[datatype])
    uniform = np.random.default_rng(_SEED).random(count)
    scale = 1 if np.issubdtype(NUMPY_BY_DATATYPE[datatype], np.inexact) or datatype == "BF16" else 2
    return encode((uniform * scale).astype(NUMPY_BY_DATATYPE[datatype])).data


def _file_row(datatype: str, count: int, filename: str, folder: Path) -> bytes:
    if fault := path_fault(filename, "the folder 'warmup'"):
        raise ValueError(fault)
    try:
        row = (folder / filename).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {folder / filename}: {error.strerror}") from None
    if datatype != "BYTES" and len(row) != (expected := count * ITEMSIZE_BYTES[datatype]):
        raise ValueError(f"{folder / filename} has {len(row)} bytes, expected {expected}")
    return row
