"""``reshape`` of inputs and outputs: clients see one shape, what answers them another one of as many elements.

The rules are those of Triton Inference Server.
"""

from collections.abc import Sequence

from weft.base.tensors import num_elements


def reshaped(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Convert ``shape``, which fits the dims ``source``, to one that fits ``target``.

    Sizes of the -1 in ``source`` are those of the -1 in ``target``, in order. A batch dimension before the dims stays.
    """
    num_before = len(shape) - len(source)
    sizes = iter([size for size, dim in zip(shape[num_before:], source, strict=True) if dim == -1])
    return (*shape[:num_before], *(next(sizes) if dim == -1 else dim for dim in target))


def reshape_fault(dims: Sequence[int], shape: Sequence[int], *, has_batch: bool) -> tuple[str, str] | None:
    """What keeps a ``reshape`` from having as many elements as ``dims`` for every size of each -1.

    Args:
        dims: Of the tensor; they were checked.

    Returns:
        The field at fault, and what is said after the name of the tensor; None where it is sound.
    """
    if any(dim < -1 or dim == 0 for dim in shape):
        return "reshape.shape", f"reshape dimensions must be integer >= 1, or -1 for any size, got {list(shape)}"
    if not shape and not has_batch:
        return "reshape", (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported; use "
            "reshape { shape: [ 1 ] }, or max_batch_size"
        )
    of_dims, of_shape = list(dims).count(-1), list(shape).count(-1)
    if of_dims != of_shape:
        return "reshape", (
            f"has different number of variable-size dimensions for dims and reshape: {list(dims)} has {of_dims} and "
            f"{list(shape)} has {of_shape}; each -1 of one is a -1 of the other, in order"
        )
    if _chunks(dims) != _chunks(shape):
        return "reshape", (
            f"has different size for dims and reshape: {list(dims)} and {list(shape)}; the number of elements must be "
            "the same, also between each two -1"
        )
    return None


def _chunks(dims: Sequence[int]) -> list[int]:
    """Elements before, between and after the -1 of some dims."""
    places = [i for i, dim in enumerate(dims) if dim == -1]
    bounds = zip([-1, *places], [*places, len(dims)], strict=True)
    return [num_elements(dims[low + 1 : high]) for low, high in bounds]
