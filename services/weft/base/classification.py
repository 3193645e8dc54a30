"""The V2 extension "classification": outputs as their top classes.

Source: ``protocol/extension_classification.md`` of Triton Inference Server.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from weft.base.core import InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.tensors import Array, WireTensor, bytes_tensor, decode
from weft.base.tensors import num_elements as count_elements

PARAMETER = "classification"

#: Largest row, in elements, that can be classified.
MAX_ELEMENTS = 1_000_000


def check_classification(requested: Sequence[RequestedOutput]) -> bool:
    """Whether the request asks for classes. Raises InvalidArgumentError for an invalid number of them."""
    asks_for_classes = False
    for output in requested:
        if output.parameters and PARAMETER in output.parameters:
            asks_for_classes = True
            count = output.parameters[PARAMETER]
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InvalidArgumentError(
                    f"parameter '{PARAMETER}' of output '{output.name}' must be an integer above 0, got {count!r:.80}"
                )
    return asks_for_classes


async def classified(
    result: InferResult, requested: Sequence[RequestedOutput], signature: ModelSignature
) -> InferResult:
    """``classify`` on a thread, if classes were requested; returns ``result``."""
    if any(PARAMETER in output.parameters for output in requested):
        await asyncio.to_thread(classify, result, requested, signature)
    return result


def classify(result: InferResult, requested: Sequence[RequestedOutput], signature: ModelSignature) -> None:
    """Replace outputs that were requested as classes by their top classes.

    Raises:
        InvalidArgumentError: An output has no order, or too many elements.
    """
    for output in requested:
        if PARAMETER in output.parameters and output.name in result.outputs:
            count, tensor = int(output.parameters[PARAMETER]), result.outputs[output.name]
            labels = next((spec.labels for spec in signature.outputs if spec.name == output.name), ())
            is_batching = signature.max_batch_size > 0
            result.outputs[output.name] = best_classes(output.name, tensor, count, labels, is_batching=is_batching)


def best_classes(name: str, tensor: WireTensor, count: int, labels: Sequence[str], *, is_batching: bool) -> WireTensor:
    """BYTES ``value:index`` or ``value:index:label`` of the ``count`` largest elements of each row, largest first.

    Among equal elements the lower index comes first; NaN comes last.

    Args:
        tensor: Numeric; a row is everything but the batch dimension.
        count: At least 1; a row with fewer elements returns all.
        labels: Name of each class; a class without one is described by value and index.

    Returns:
        Shape [batch, min(count, elements)], without batch [min(count, elements)].

    Raises:
        InvalidArgumentError: ``tensor`` is BYTES or BOOL, or has more than ``MAX_ELEMENTS`` in a row.
    """
    if tensor.datatype in ("BYTES", "BOOL"):
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype}': output '{name}'; "
            "ask for the tensor itself"
        )
    array = decode(tensor, name=name)
    num_rows = array.shape[0] if is_batching else 1
    num_elements = count_elements(array.shape[1:] if is_batching else array.shape)
    rows = array.reshape(num_rows, num_elements)
    if num_elements > MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"classification output tensor too large: output '{name}' has {num_elements} elements in a row, "
            f"{MAX_ELEMENTS} can be classified; ask for the tensor itself"
        )
    is_float = tensor.datatype in ("FP16", "BF16", "FP32", "FP64")
    if is_float:
        rows = rows.astype(np.float64)
    order = np.argsort(_descending(rows), axis=1, kind="stable")[:, :count]
    elements = [
        _text(value, index, labels, is_float=is_float)
        for row, indexes in zip(rows, order.tolist(), strict=True)
        for value, index in zip(row[indexes].tolist(), indexes, strict=True)
    ]
    shape = (num_rows, order.shape[1]) if is_batching else (order.shape[1],)
    return bytes_tensor(elements, shape)


def _descending(rows: Array) -> Array:
    """Sort keys for descending order; integers are inverted bitwise, because the smallest one has no negative."""
    return -rows if rows.dtype.kind == "f" else np.invert(rows)


def _text(value: float, index: int, labels: Sequence[str], *, is_float: bool) -> str:
    number = f"{value:f}" if is_float else str(value)
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
