"""What a model answered, held against what it declared: a graph promises its types, so none that differs goes on."""

from weft_common.errors import InvalidArgumentError
from weft_common.signature import TensorSpec
from weft_common.tensors import ITEMSIZE_BYTES, WireTensor, check_bytes, num_elements


def misfit(tensor: WireTensor, spec: TensorSpec, *, has_batch: bool) -> str:
    """How an output differs from its declaration; "" if it does not.

    Args:
        tensor: As answered.
        spec: As declared.
        has_batch: A batch dimension precedes ``spec.dims``; how many rows it has is not looked at.
    """
    datatype, shape, data = tensor
    if datatype != spec.datatype:
        return f"it is {datatype}, declared as {spec.datatype}"
    dims = (-1, *spec.dims) if has_batch else spec.dims
    if len(shape) != len(dims) or any(got < 0 or want not in (-1, got) for got, want in zip(shape, dims, strict=True)):
        return f"its shape is [{_text(shape)}], declared as [{_text(dims)}]"
    if datatype == "BYTES":
        try:
            check_bytes(data, num_elements(shape), name=spec.name, model="")
        except InvalidArgumentError:
            return f"its {len(data)} bytes are not the {num_elements(shape)} strings of shape [{_text(shape)}]"
    elif len(data) != (expected := num_elements(shape) * ITEMSIZE_BYTES[datatype]):
        return f"it has {len(data)} bytes, its shape [{_text(shape)}] takes {expected}"
    return ""


def _text(dims: tuple[int, ...]) -> str:
    return ",".join(map(str, dims))
