"""Validation of a call against a signature, before queueing; messages match those of Triton Inference Server."""

from collections.abc import Iterable

from weft.base.core import InferCall, Parameters
from weft.base.errors import InvalidArgumentError
from weft.base.signature import EMPTY_BATCH_PARAMETER, ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, check_bytes, fits, num_elements


def validate(call: InferCall, signature: ModelSignature, *, can_split: bool = False) -> int:
    """Validate a call and return its batch size in rows; 1 for a model without batch dimension.

    Args:
        can_split: More rows than ``max_batch_size`` are allowed.

    Raises:
        InvalidArgumentError: A name, datatype, shape, byte size or batch size does not match; the message says which,
            the expected and the actual value.
    """
    try:
        num_rows = _rows_if_plain(call, signature)
        if num_rows < 0:
            num_rows = _check_inputs(call, signature)
        if num_rows > signature.max_batch_size > 0 and not can_split:
            raise InvalidArgumentError(
                f"inference request batch-size must be <= {signature.max_batch_size} for '{signature.name}', got "
                f"{num_rows}; send fewer rows in one request"
            )
        if call.outputs:
            _check_outputs(call, signature)
    except InvalidArgumentError as error:
        raise error.with_message(f"[request id: {call.request_id or '<id_unknown>'}] {error.message}") from None
    return num_rows if num_rows >= 0 else 1


def scheduling_parameters(parameters: Parameters) -> tuple[int, int]:
    """``priority`` (0 = default) and ``timeout`` in microseconds (0 = none) of a request.

    Raises:
        InvalidArgumentError: One of them is not a whole number, or is negative.
    """
    if not parameters:
        return 0, 0
    values = []
    for key in ("priority", "timeout"):
        value = parameters.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgumentError(f"parameter '{key}' must be a whole number of at least 0, got {value!r}")
        values.append(value)
    return values[0], values[1]


def _rows_if_plain(call: InferCall, signature: ModelSignature) -> int:
    """Batch size of a call with every input, each of fixed size; -1 if only the slower checks can tell."""
    inputs, specs, has_batch = call.inputs, signature.inputs, signature.max_batch_size > 0
    if len(inputs) != len(specs):
        return -1
    num_rows = -1
    for spec in specs:
        tensor = inputs.get(spec.name)
        if tensor is None:
            return -1
        datatype, shape, data = tensor
        if not spec.fits(datatype, shape, len(data), has_batch=has_batch):
            return -1
        rows = shape[0] if has_batch else 1
        if num_rows not in (-1, rows):
            return -1
        num_rows = rows
    return num_rows


def _check_inputs(call: InferCall, signature: ModelSignature) -> int:
    """Validate the inputs; returns their batch size, -1 without inputs."""
    check_names(call, signature)
    num_rows = -1
    for spec in signature.inputs:
        tensor = call.inputs.get(spec.name)
        if tensor is None:
            continue
        rows = _check_tensor(spec, tensor, signature)
        if num_rows not in (-1, rows):
            raise InvalidArgumentError(
                f"input '{spec.name}' batch size does not match other inputs for '{signature.name}': got {rows}, "
                f"others have {num_rows}"
            )
        num_rows = rows
    return num_rows


def check_names(call: InferCall, signature: ModelSignature) -> None:
    """Raises InvalidArgumentError for an unknown or a missing input."""
    if len(call.inputs) == len(signature.inputs):
        for spec in signature.inputs:
            if spec.name not in call.inputs:
                break
        else:
            return
    names = [spec.name for spec in signature.inputs]
    required = [spec.name for spec in signature.inputs if not spec.is_optional]
    got = list(call.inputs)
    model = signature.name
    missing = [name for name in required if name not in call.inputs]
    allowed = (
        f"{len(names)} inputs"
        if len(required) == len(names)
        else f"number of inputs between {len(required)} and {len(names)}"
    )
    count = f"expected {allowed} but got {len(got)} inputs for model '{model}'. Got input(s) {_quoted(got)}, but "
    for name in got:
        if name not in names:
            unexpected = f"unexpected inference input '{name}' for model '{model}'; it takes {', '.join(names)}"
            raise InvalidArgumentError(count + unexpected if len(got) > len(names) else unexpected)
    if missing:
        raise InvalidArgumentError(
            f"{count}missing required input(s) {_quoted(missing)}. Please provide all required input(s)."
        )


def _check_outputs(call: InferCall, signature: ModelSignature) -> None:
    """Raise for a requested output that the model does not have."""
    for output in call.outputs:
        for spec in signature.outputs:
            if spec.name == output.name:
                break
        else:
            raise InvalidArgumentError(
                f"unexpected inference output '{output.name}' for model '{signature.name}'; it has "
                f"{', '.join(spec.name for spec in signature.outputs)}"
            )


def _check_tensor(spec: TensorSpec, tensor: WireTensor, signature: ModelSignature) -> int:
    """Validate one input; returns its rows, 1 without batch dimension."""
    datatype, shape, data = tensor
    has_batch = signature.max_batch_size > 0
    least_rows = 0 if signature.allows_empty_batch else 1
    model = signature.name
    if datatype != spec.datatype:
        raise InvalidArgumentError(
            f"inference input '{spec.name}' data-type is '{datatype}', but model '{model}' expects '{spec.datatype}'"
        )
    row_shape = shape[1:] if has_batch else shape
    if (has_batch and (not shape or shape[0] < least_rows)) or (
        (row_shape != spec.dims or -1 in row_shape) and not fits(row_shape, spec.dims)
    ):
        limit = signature.max_batch_size
        sizes = f"{least_rows} to {limit}"
        note = f" NOTE: max_batch_size is {limit}, so the first dimension is the batch size, {sizes}." * has_batch
        if has_batch and shape[:1] == (0,) and least_rows:
            note += (
                f" A model takes a batch of no rows if its configuration has the parameter '{EMPTY_BATCH_PARAMETER}'."
            )
        raise InvalidArgumentError(
            f"unexpected shape for input '{spec.name}' for model '{model}'. Expected "
            f"{_text(signature.full_shape(spec))}, got {_text(shape)}.{note}"
        )
    if datatype == "BYTES":
        check_bytes(data, num_elements(shape), name=spec.name, model=model)
    elif len(data) != (expected := num_elements(shape) * ITEMSIZE_BYTES[datatype]):
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{spec.name}' for model '{model}'. Expected {expected}, "
            f"got {len(data)}"
        )
    return shape[0] if has_batch else 1


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"
