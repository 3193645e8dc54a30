"""Combine methods: how an ensemble makes one tensor of those of its steps. One module each, or one for a family."""

from weft_router.combine.choice import FIRST, KEYED, MERGE
from weft_router.combine.custom import CUSTOM, stack_with_mask
from weft_router.combine.layout import CONCAT, STACK
from weft_router.combine.method import CombineMethod, CombineSettings
from weft_router.combine.numbers import AVERAGE, MAX, MEDIAN, MIN, SUM
from weft_router.combine.vote import VOTE

#: By the names of the values of ``Combine.Method`` in ``graph.proto``.
METHODS: dict[str, CombineMethod] = {
    method.name: method for method in (KEYED, VOTE, AVERAGE, MEDIAN, SUM, MIN, MAX, CONCAT, STACK, FIRST, CUSTOM, MERGE)
}

__all__ = ["METHODS", "CombineMethod", "CombineSettings", "stack_with_mask"]
