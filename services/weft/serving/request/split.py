"""Cuts a call above ``max_batch_size`` into calls within it, and joins their results."""

from collections.abc import Iterator, Sequence
from struct import Struct

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor, num_elements

#: A request of more parts is refused: each waits in the queue on its own.
MAX_PARTS = 1024

_LENGTH = Struct("<I")


def split_call(call: InferCall, num_rows: int, max_rows: int) -> list[InferCall]:
    """Calls of at most ``max_rows`` rows each, in order, of a checked call of ``num_rows``; their bytes are copies.

    Raises InvalidArgumentError for more than ``MAX_PARTS`` parts.
    """
    bounds = [*range(0, num_rows, max_rows), num_rows]
    if len(bounds) - 1 > MAX_PARTS:
        raise InvalidArgumentError(
            f"inference request batch-size must be <= {MAX_PARTS * max_rows} for '{call.model_name}', which splits "
            f"requests into at most {MAX_PARTS} parts of {max_rows} rows, got {num_rows}; send fewer rows"
        )
    rows = {name: list(_cut(tensor, bounds)) for name, tensor in call.inputs.items()}
    return [
        InferCall(
            call.model_name,
            call.model_version,
            call.request_id,
            call.parameters,
            {name: tensors[i] for name, tensors in rows.items()},
            call.outputs,
        )
        for i in range(len(bounds) - 1)
    ]


def _cut(tensor: WireTensor, bounds: Sequence[int]) -> Iterator[WireTensor]:
    datatype, shape, data = tensor
    offsets = _offsets(data, shape, bounds) if datatype == "BYTES" else [len(data) // shape[0] * row for row in bounds]
    for i in range(len(bounds) - 1):
        yield WireTensor(datatype, (bounds[i + 1] - bounds[i], *shape[1:]), data[offsets[i] : offsets[i + 1]])


def _offsets(data: bytes, shape: Sequence[int], bounds: Sequence[int]) -> list[int]:
    """Where in the data of BYTES elements the rows of ``bounds`` begin."""
    per_row = num_elements(shape[1:])
    offsets, offset, element = [], 0, 0
    for row in bounds:
        while element < row * per_row:
            offset += 4 + _LENGTH.unpack_from(data, offset)[0]
            element += 1
        offsets.append(offset)
    return offsets


def join_results(results: Sequence[InferResult]) -> InferResult:
    """One result with the rows of all.

    Raises InvalidArgumentError if the parts have different outputs, or rows of different shape.
    """
    first = results[0]
    outputs: dict[str, WireTensor] = {}
    given = {name: tensor for result in reversed(results) for name, tensor in reversed(result.outputs.items())}
    for name, (datatype, shape, _) in reversed(given.items()):
        tensors = [result.outputs.get(name) for result in results]
        shapes = {None if tensor is None else (tensor.datatype, *tensor.shape[1:]) for tensor in tensors}
        if shapes != {(datatype, *shape[1:])} or not shape:
            raise InvalidArgumentError(
                f"the parts of the request cannot be joined: output '{name}' has rows of shapes "
                f"{sorted(map(str, shapes))}; send at most as many rows as the model's max_batch_size in one request"
            )
        joined = [tensor for tensor in tensors if tensor is not None]
        num_rows = sum(tensor.shape[0] for tensor in joined)
        outputs[name] = WireTensor(datatype, (num_rows, *shape[1:]), b"".join([tensor.data for tensor in joined]))
    return InferResult(first.model_name, first.model_version, first.request_id, first.parameters, outputs)
