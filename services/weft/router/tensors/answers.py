"""What a model answered, held against what it declared: what differs does not go on."""

from collections.abc import Mapping

from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, check_bytes, num_elements


def rows_of(inputs: Mapping[str, WireTensor], *, is_batching: bool) -> int:
    """Rows of a call, and so of its answer; -1 where there is no batch dimension to tell it."""
    if is_batching:
        for _, shape, _ in inputs.values():
            return shape[0] if shape else -1
    return -1


def check_outputs(outputs: Mapping[str, WireTensor], signature: ModelSignature) -> None:
    """Return if every declared output that is there is as the model declares.

    About 1 us for each output; for BYTES 0.1 us for each string beside.

    Args:
        outputs: As answered.
        signature: Of the model.

    Raises:
        InternalError: The message names model and output, and says what is wrong.
    """
    has_batch = signature.max_batch_size > 0
    for spec in signature.outputs:
        tensor = outputs.get(spec.name)
        if tensor is not None and (fault := misfit(tensor, spec, has_batch=has_batch)):
            raise broken_promise(signature.name, spec, fault)


def broken_promise(model: str, spec: TensorSpec, fault: str) -> InternalError:
    """The error of an output with that ``fault``, as ``misfit`` says it."""
    return InternalError(f"output '{spec.name}' of model '{model}' is not as it declares: {fault}")


def misfit(tensor: WireTensor, spec: TensorSpec, *, has_batch: bool, num_rows: int = -1) -> str:
    """How an output differs from its declaration; "" if it does not.

    Args:
        tensor: As answered.
        spec: As declared.
        has_batch: A batch dimension precedes ``spec.dims``.
        num_rows: Its size; -1 is any.
    """
    datatype, shape, data = tensor
    if spec.fits(datatype, shape, len(data), has_batch=has_batch) and (not has_batch or num_rows in (-1, shape[0])):
        return ""
    if datatype != spec.datatype:
        return f"it is {datatype}, declared as {spec.datatype}"
    row_shape = shape[1:] if has_batch else shape
    if (has_batch and (not shape or shape[0] < 0)) or (
        (row_shape != spec.dims or -1 in row_shape) and not _fits(row_shape, spec.dims)
    ):
        dims = (-1, *spec.dims) if has_batch else spec.dims
        return f"its shape is [{_text(shape)}], declared as [{_text(dims)}]"
    if has_batch and num_rows not in (-1, shape[0]):
        return f"its batch size is {shape[0]}, that of the request is {num_rows}"
    if datatype == "BYTES":
        try:
            check_bytes(data, num_elements(shape), name=spec.name, model="")
        except InvalidArgumentError:
            return f"its {len(data)} bytes are not the {num_elements(shape)} strings of shape [{_text(shape)}]"
    elif len(data) != (expected := num_elements(shape) * ITEMSIZE_BYTES[datatype]):
        return f"it has {len(data)} bytes, its shape [{_text(shape)}] takes {expected}"
    return ""


def _fits(row_shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(row_shape) == len(dims) and all(
        got >= 0 and want in (-1, got) for got, want in zip(row_shape, dims, strict=True)
    )


def _text(dims: tuple[int, ...]) -> str:
    return ",".join(map(str, dims))
