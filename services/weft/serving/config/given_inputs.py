"""Tensors that the server adds: control inputs and state of sequences, warm-up samples."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.signature import TensorSpec, datatype_name
from weft.base.tensors import (
    ITEMSIZE_BYTES,
    NUMPY_BY_DATATYPE,
    WireTensor,
    encode,
    encode_bytes,
    num_elements,
    reshaped,
)
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import Backend, Batch
from weft.serving.backends.sequences import ImplicitState, SequenceInputs, Signal
from weft.serving.config.checks import ConfigReport, model_dims, path_fault
from weft.serving.request.request import InferenceRequest, Outcome
from weft_protos.model_config_pb2 import ModelConfig, ModelInput, ModelSequenceBatching, ModelWarmup

_PATH = "sequence_batching"
_FLAGS = (("int32_false_true", "INT32"), ("fp32_false_true", "FP32"), ("bool_false_true", "BOOL"))
_ID_DATATYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
#: Of the initial state of a sequence, and of one input of a warm-up sample.
MAX_BYTES = 1 << 30
_SEED = 0
_STRING = b"warm-up"
_LENGTH_BYTES = 4  # of an empty string


def drop_added(config: ModelConfig, declared: Collection[str]) -> None:
    """Hide from clients the inputs and outputs of the model's file that the server adds and keeps.

    Those in ``declared``, which the configuration had before a backend completed it, stay.
    """
    batching = config.sequence_batching
    given = {*(c.name for c in batching.control_input), *(state.input_name for state in batching.state)}
    kept = {state.output_name for state in batching.state}
    for tensors, names in ((config.input, given - {*declared}), (config.output, kept - {*declared})):
        for i in reversed(range(len(tensors))):
            if tensors[i].name in names:
                del tensors[i]


def sequence_inputs(config: ModelConfig, directory: Path, report: ConfigReport) -> SequenceInputs | None:
    """The inputs and states that the server adds, with files of initial_state/; None without sequences."""
    if not config.HasField("sequence_batching"):
        return None
    batching, has_batch = config.sequence_batching, config.max_batch_size > 0
    _check_names(config, report)
    for i, warmup in enumerate(config.model_warmup):
        fault = f"sequence_batching takes one row at a time; batch_size must be 1, got {warmup.batch_size}"
        report.refuse(warmup.batch_size > 1, f"model_warmup[{i}].batch_size", fault)
    fault = "state is not possible for a decoupled model; keep it in the model"
    report.refuse(config.model_transaction_policy.decoupled and batching.state, f"{_PATH}.state", fault)
    signals: list[Signal] = []
    id_spec: TensorSpec | None = None
    kinds: set[str] = set()
    for path, name, kind, control in _controls(batching):
        fault = f"sequence batching specifies multiple CONTROL_SEQUENCE_{kind} tensors, '{name}' is one"
        report.refuse(kind in kinds, path, fault)
        kinds.add(kind)
        if kind == "CORRID":
            id_spec = _id_spec(path, name, control, report)
        elif (signal := _signal(path, name, kind, control, has_batch, report)) is not None:
            signals.append(signal)
    states = [
        state
        for i, message in enumerate(batching.state)
        if (state := _state(f"{_PATH}.state[{i}]", message, config, directory, report)) is not None
    ]
    is_direct = batching.WhichOneof("strategy_choice") != "oldest"
    return SequenceInputs(is_direct and has_batch, tuple(signals), id_spec, tuple(states))


def id_datatype(batching: ModelSequenceBatching) -> str:
    """Datatype of the input that gets the sequence id; "" if there is none."""
    found = (datatype_name(control.data_type) for _, _, kind, control in _controls(batching) if kind == "CORRID")
    return next(found, "")


def _controls(batching: ModelSequenceBatching) -> Iterator[tuple[str, str, str, ModelSequenceBatching.Control]]:
    """Path, input, kind and control of each control input."""
    for i, control_input in enumerate(batching.control_input):
        for j, control in enumerate(control_input.control):
            kind = ModelSequenceBatching.Control.Kind.Name(control.kind).removeprefix("CONTROL_SEQUENCE_")
            yield f"{_PATH}.control_input[{i}].control[{j}]", control_input.name, kind, control


def _check_names(config: ModelConfig, report: ConfigReport) -> None:
    batching = config.sequence_batching
    inputs = {tensor.name for tensor in config.input}
    named = [(f"control_input[{i}].name", "control input", c.name) for i, c in enumerate(batching.control_input)]
    named += [(f"state[{i}].input_name", "state input", state.input_name) for i, state in enumerate(batching.state)]
    for path, called, name in named:
        fault = f"'{name}' is an input already; the server gives it, so declare it once" if name in inputs else ""
        fault = fault if name else "must specify a name"
        report.refuse(fault, f"{_PATH}.{path}", f"sequence batching {called} {fault}")
        inputs.add(name)
    for i, given in enumerate(batching.control_input):
        fault = f"control input '{given.name}' must have one control, got {len(given.control)}"
        report.refuse(len(given.control) != 1, f"{_PATH}.control_input[{i}]", fault)


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
    path: str, name: str, kind: str, control: ModelSequenceBatching.Control, has_batch: bool, report: ConfigReport
) -> Signal | None:
    given = [(field, datatype) for field, datatype in _FLAGS if getattr(control, field)]
    if len(given) != 1:
        fields = ", ".join(field for field, _ in _FLAGS)
        what = f"sequence batching control '{name}' must specify exactly one of {fields}"
        report.error(path, f"{what}, got {len(given)}")
        return None
    field, datatype = given[0]
    pair = list(getattr(control, field))
    if len(pair) != 2:
        what = f"sequence batching control '{field}' must have exactly 2 entries for CONTROL_SEQUENCE_{kind}"
        report.error(path, f"{what}, got {len(pair)}")
        return None
    shape = (1, 1) if has_batch else (1,)
    no, yes = (encode(np.full(shape, value, NUMPY_BY_DATATYPE[datatype])) for value in pair)
    return Signal(TensorSpec(name, datatype, (1,)), kind, (no, yes))


def _state(
    path: str, message: ModelSequenceBatching.State, config: ModelConfig, directory: Path, report: ConfigReport
) -> ImplicitState | None:
    name, datatype, dims = message.input_name, datatype_name(message.data_type), tuple(message.dims)
    num_faults = len(report.diagnostics)
    fault = f"state '{name}' must specify output_name, the output that the next request gets"
    report.refuse(not message.output_name, path, fault)
    report.refuse(datatype == "INVALID", path, f"state '{name}' must specify 'data_type', for example TYPE_FP32")
    fault = f"dims of state '{name}' must be at least 1, or -1 for any size, got {list(dims)}"
    report.refuse(any(dim < -1 or dim == 0 for dim in dims), path, fault)
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
    try:
        initial = _initial_state(message, datatype, dims, directory / "initial_state")
    except ValueError as error:
        report.error(f"{path}.initial_state[0]" if message.initial_state else path, str(error))
        return None
    if config.max_batch_size > 0:
        initial = initial._replace(shape=(1, *initial.shape))
    return ImplicitState(TensorSpec(name, datatype, dims), message.output_name, initial, output is not None)


def _initial_state(
    message: ModelSequenceBatching.State, datatype: str, dims: tuple[int, ...], folder: Path
) -> WireTensor:
    """The state of a sequence that starts, without batch dimension. Raises ValueError. A -1 without a size is 1."""
    name, shape, kind, initial = message.input_name, tuple(max(dim, 1) for dim in dims), "zero_data", None
    if message.initial_state:
        initial = message.initial_state[0]
        if len(message.initial_state) > 1:
            raise ValueError(f"state '{name}' must have one initial_state, got {len(message.initial_state)}")
        shape, kind = tuple(initial.dims), initial.WhichOneof("state_data") or ""
        if datatype_name(initial.data_type) != datatype or not _fits(shape, dims):
            raise ValueError(
                f"initial_state of '{name}' is {datatype_name(initial.data_type)} {list(shape)}, but the "
                f"state is {datatype} {list(dims)}; each dimension must be at least 1"
            )
    count = num_elements(shape)
    if initial is not None and kind == "data_file":
        return WireTensor(datatype, shape, _file_bytes(folder, initial.data_file, datatype, count))
    if kind != "zero_data":
        raise ValueError(f"initial_state of '{name}' must specify zero_data or data_file")
    num_bytes = count * ITEMSIZE_BYTES.get(datatype, _LENGTH_BYTES)
    if num_bytes > MAX_BYTES:
        raise ValueError(f"state '{name}' has {num_bytes} bytes; at most {MAX_BYTES} are allowed")
    return WireTensor(datatype, shape, _zeros(datatype, count))


class WarmupSample(NamedTuple):
    """One sample request: inputs by name, batch dimension included, its batch size and its number of runs."""

    name: str
    inputs: Mapping[str, WireTensor]
    num_rows: int
    num_runs: int


def warmed(backend: type[Backend], samples: Sequence[WarmupSample]) -> type[Backend]:
    """Extend ``backend`` so that ``load`` also runs the samples; a failing sample fails the load."""

    class WarmedBackend(backend):  # type: ignore[valid-type,misc]  # the base is a value here
        def load(self) -> None:
            super().load()
            for name, batch in self._runs():
                _check_warm_up(name, *self.execute(batch))

        async def open(self) -> None:
            await super().open()
            for name, batch in self._runs():
                done: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
                self.start(batch, lambda outcomes, done=done: done.done() or done.set_result(outcomes))
                _check_warm_up(name, *await done)

        def _runs(self) -> Iterator[tuple[str, Batch]]:
            for name, inputs, num_rows, num_runs in samples:
                for _ in range(num_runs):
                    call = InferCall(self.model.signature.name, inputs=dict(inputs))
                    yield name, Batch([InferenceRequest(call, CallContext(), num_rows=num_rows)])

    WarmedBackend.__name__ = WarmedBackend.__qualname__ = backend.__name__
    return WarmedBackend


def _check_warm_up(name: str, outcome: Outcome) -> None:
    if isinstance(outcome, WeftError):
        raise outcome.with_message(f"warm-up sample '{name}' failed: {outcome.message}")


def warmup_samples(config: ModelConfig, directory: Path, report: ConfigReport) -> list[WarmupSample]:
    """Samples that every instance runs before it is ready, with files of warmup/; without those with a fault."""
    samples = []
    largest, known = max(config.max_batch_size, 1), [tensor.name for tensor in config.input]
    for i, warmup in enumerate(config.model_warmup):
        path = f"model_warmup[{i}]"
        num_faults = len(report.diagnostics)
        fault = f"warm-up batch_size must be between 1 and {largest}, got {warmup.batch_size}"
        report.refuse(not 1 <= warmup.batch_size <= largest, f"{path}.batch_size", fault)
        for name in sorted(set(warmup.inputs) - set(known)):
            report.error(f"{path}.inputs[{name}]", f"the model has no input '{name}'{suggestion(name, known)}")
        inputs: dict[str, WireTensor] = {}
        for tensor in config.input:
            if tensor.name in warmup.inputs:
                try:
                    inputs[tensor.name] = _warmup_tensor(tensor, warmup, config.max_batch_size > 0, directory)
                except ValueError as error:
                    report.error(f"{path}.inputs[{tensor.name}]", f"warm-up input '{tensor.name}'{error}")
            elif not tensor.optional:
                report.error(path, f"the warm-up lacks input '{tensor.name}', which the model needs")
        if len(report.diagnostics) == num_faults:
            samples.append(WarmupSample(warmup.name or str(i), inputs, max(warmup.batch_size, 1), max(warmup.count, 1)))
    return samples


def _warmup_tensor(tensor: ModelInput, warmup: ModelWarmup, has_batch: bool, directory: Path) -> WireTensor:
    """Data of one input, the same in every row. Raises ValueError with what follows the name of the input."""
    data = warmup.inputs[tensor.name]
    datatype, dims = datatype_name(data.data_type), tuple(data.dims)
    if data.data_type != tensor.data_type or not _fits(dims, tensor.dims):
        raise ValueError(
            f" has {datatype} {list(dims)}, but the model takes {datatype_name(tensor.data_type)} "
            f"{list(tensor.dims)}, each dimension at least 1"
        )
    count = num_elements(dims)
    num_bytes = max(warmup.batch_size, 1) * count * ITEMSIZE_BYTES.get(datatype, _LENGTH_BYTES + len(_STRING))
    if num_bytes > MAX_BYTES:
        raise ValueError(f" has {num_bytes} bytes; at most {MAX_BYTES} are allowed")
    kind = data.WhichOneof("input_data_type")
    if kind == "input_data_file":
        try:
            row = _file_bytes(directory / "warmup", data.input_data_file, datatype, count)
        except ValueError as error:
            raise ValueError(f": {error}") from None
    elif kind == "zero_data":
        row = _zeros(datatype, count)
    elif kind != "random_data":
        raise ValueError(": set one of zero_data, random_data and input_data_file")
    elif datatype == "BYTES":
        row = encode_bytes([_STRING] * count)
    else:
        dtype = NUMPY_BY_DATATYPE[datatype]
        scale = 1 if np.issubdtype(dtype, np.inexact) or datatype == "BF16" else 2
        row = encode((np.random.default_rng(_SEED).random(count) * scale).astype(dtype)).data
    shape = reshaped(dims, tensor.dims, model_dims(tensor))
    if not has_batch:
        return WireTensor(datatype, shape, row)
    return WireTensor(datatype, (warmup.batch_size, *shape), row * warmup.batch_size)


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether an array of the shape, each dimension at least 1, has the dims."""
    return len(shape) == len(dims) and all(got > 0 and want in (-1, got) for got, want in zip(shape, dims, strict=True))


def _zeros(datatype: str, count: int) -> bytes:
    return encode_bytes([b""] * count) if datatype == "BYTES" else bytes(count * ITEMSIZE_BYTES[datatype])


def _file_bytes(folder: Path, filename: str, datatype: str, count: int) -> bytes:
    if fault := path_fault(filename, f"the folder '{folder.name}'"):
        raise ValueError(fault)
    try:
        data = (folder / filename).read_bytes()
    except OSError as error:
        near = suggestion(filename, [entry.name for entry in folder.glob("*")])
        raise ValueError(f"cannot read {folder / filename}: {error.strerror}{near}") from None
    if datatype != "BYTES" and len(data) != (expected := count * ITEMSIZE_BYTES[datatype]):
        raise ValueError(f"{folder / filename} has {len(data)} bytes, expected {expected}")
    return data
