"""Inputs of stateful sequences: control inputs, and implicit state."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, WeftError
from weft.base.signature import TensorSpec
from weft.base.tensors import (
    ITEMSIZE_BYTES,
    NUMPY_BY_DATATYPE,
    Array,
    WireTensor,
    decode,
    encode,
    encode_bytes,
    fits,
    num_elements,
)
from weft.serving.backends.base import Backend, Batch
from weft.serving.request.request import (
    RESCHEDULED,
    InferenceRequest,
    Outcome,
    RequestSequence,
    SequencePosition,
)


@dataclass(frozen=True, slots=True)
class Signal:
    """An input of kind START, END or READY; ``values`` mean false and true, batch dimension included."""

    spec: TensorSpec
    kind: str
    values: tuple[WireTensor, WireTensor]


@dataclass(frozen=True, slots=True)
class ImplicitState:
    """A tensor that is an output of one request of a stateful sequence, and an input of the next.

    Attributes:
        initial: Value for the first request of a sequence, batch dimension included.
        is_answered: Clients get the output, because it is declared too.
    """

    spec: TensorSpec
    output: str
    initial: WireTensor
    is_answered: bool = False


@dataclass(frozen=True, slots=True)
class SequenceInputs:
    """The inputs that ``sequence_batching`` adds; ``has_fixed_rows``: each sequence has a fixed row in the batch."""

    has_fixed_rows: bool = False
    signals: tuple[Signal, ...] = ()
    id_spec: TensorSpec | None = None
    states: tuple[ImplicitState, ...] = ()

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Inputs that the server adds to those of requests."""
        ids = () if self.id_spec is None else (self.id_spec,)
        return (*(signal.spec for signal in self.signals), *ids, *(state.spec for state in self.states))

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """Outputs that the server keeps."""
        return tuple(replace(state.spec, name=state.output) for state in self.states if not state.is_answered)


def sequenced(backend: type[Backend], inputs: SequenceInputs) -> type[Backend]:
    """Extend ``backend`` by the inputs of stateful sequences. A request that fails does not change the states."""

    class SequencedBackend(backend):  # type: ignore[valid-type,misc]  # the base is a value here
        is_repeatable: ClassVar[bool] = False

        def execute(self, batch: Batch) -> list[Outcome]:
            filled, rows = self._filled(batch)
            return self._emptied(batch, filled, rows, super().execute(filled))

        def start(self, batch: Batch, on_end: Callable[[list[Outcome] | None], None]) -> None:
            filled, rows = self._filled(batch)
            super().start(filled, lambda found: on_end(found and self._emptied(batch, filled, rows, found)))

        def _filled(self, batch: Batch) -> tuple[Batch, list[int]]:
            """The batch as the model gets it, and the place of each of its requests in that."""
            positions = list(map(_position, batch.requests))
            has_batch = self.model.signature.max_batch_size > 0
            for request, position in zip(batch.requests, positions, strict=True):
                request.add_inputs(_added_inputs(inputs, position, is_ready=True, has_batch=has_batch))
            rows = list(range(len(positions)))
            if not inputs.has_fixed_rows:
                return batch, rows
            rows = [max(position.sequence.row, 0) for position in positions]
            by_row = dict(zip(rows, batch.requests, strict=True))
            members = [by_row.get(row) or self._filler(batch.requests[0]) for row in range(max(rows) + 1)]
            return Batch(members, batch.start_ns), rows

        def _emptied(self, batch: Batch, filled: Batch, rows: list[int], outcomes: list[Outcome]) -> list[Outcome]:
            batch.infer_start_ns, batch.infer_end_ns = filled.infer_start_ns, filled.infer_end_ns
            batch.num_rows = filled.num_rows
            if len(outcomes) != len(filled.requests):
                return outcomes  # the instance reports the fault
            pairs = zip(batch.requests, rows, strict=True)
            return [self._store_states(_position(request), outcomes[row]) for request, row in pairs]

        def _filler(self, like: InferenceRequest) -> InferenceRequest:
            has_batch = self.model.signature.max_batch_size > 0
            zeros = {name: _zeros(tensor) for name, tensor in like.call.inputs.items()}
            added = _added_inputs(
                inputs, SequencePosition(RequestSequence(0), False, False), is_ready=False, has_batch=has_batch
            )
            return InferenceRequest(InferCall(like.call.model_name, inputs={**zeros, **added}), CallContext())

        def _store_states(self, position: SequencePosition, outcome: Outcome) -> Outcome:
            if outcome is RESCHEDULED or isinstance(outcome, WeftError) or not inputs.states:
                return outcome
            kept: dict[str, WireTensor] = {}
            for state in inputs.states:
                output: Any = outcome.outputs.get(state.output)
                array = decode(output) if type(output) is WireTensor else output
                fault = _fault(state, array, has_batch=self.model.signature.max_batch_size > 0)
                if fault:
                    return InternalError(f"model '{self.model.signature.name}' {fault}")
                if not state.is_answered:
                    del outcome.outputs[state.output]
                kept[state.spec.name] = encode(array)
            position.sequence.state = kept
            return outcome

    SequencedBackend.__name__ = SequencedBackend.__qualname__ = backend.__name__
    return SequencedBackend


def _added_inputs(
    inputs: SequenceInputs, position: SequencePosition, *, is_ready: bool, has_batch: bool
) -> dict[str, WireTensor]:
    flags = {"START": position.is_start, "END": position.is_end, "READY": is_ready}
    added = {signal.spec.name: signal.values[flags[signal.kind]] for signal in inputs.signals}
    sequence = position.sequence
    if inputs.id_spec is not None:
        added[inputs.id_spec.name] = _id_tensor(sequence.id, inputs.id_spec.datatype, (1, 1) if has_batch else (1,))
    for state in inputs.states:
        name = state.spec.name
        added[name] = state.initial if position.is_start else sequence.state.get(name, state.initial)
    return added


def _id_tensor(sequence_id: int | str, datatype: str, shape: tuple[int, ...]) -> WireTensor:
    if datatype == "BYTES":
        return WireTensor(datatype, shape, encode_bytes([sequence_id or ""] if isinstance(sequence_id, str) else [""]))
    size = ITEMSIZE_BYTES[datatype]
    return WireTensor(datatype, shape, int(sequence_id).to_bytes(size, "little", signed=datatype.startswith("INT")))


def _zeros(tensor: WireTensor) -> WireTensor:
    count = num_elements(tensor.shape)
    data = encode_bytes([b""] * count) if tensor.datatype == "BYTES" else bytes(len(tensor.data))
    return WireTensor(tensor.datatype, tensor.shape, data)


def _position(request: InferenceRequest) -> SequencePosition:
    return request.position or SequencePosition(RequestSequence(0), True, True)


def _fault(state: ImplicitState, array: Array | None, *, has_batch: bool) -> str:
    """Error message for an invalid state that the model returned; "" if valid."""
    if array is None:
        return f"did not give output '{state.output}', which is the state of the sequence"
    expected = (1, *state.spec.dims) if has_batch else state.spec.dims
    if array.dtype != NUMPY_BY_DATATYPE[state.spec.datatype] or not fits(array.shape, expected):
        return (
            f"gave state '{state.output}' as {array.dtype} {list(array.shape)}; its configuration says "
            f"{state.spec.datatype} {list(expected)}"
        )
    return ""
