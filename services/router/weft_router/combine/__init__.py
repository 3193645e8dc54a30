"""One tensor of several: how an ensemble makes its answer of the answers of its steps."""

from weft_router.combine.layout import concat, stack, stack_with_mask
from weft_router.combine.numbers import average, maximum, median, minimum, total
from weft_router.combine.votes import ballot_weights, vote

__all__ = [
    "average",
    "ballot_weights",
    "concat",
    "maximum",
    "median",
    "minimum",
    "stack",
    "stack_with_mask",
    "total",
    "vote",
]
