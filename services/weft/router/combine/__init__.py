"""Combine methods: how an ensemble makes one tensor of those of its steps. One module each, or one for a family."""

from weft.router.combine.choice import FIRST, KEYED, MERGE
from weft.router.combine.custom import CUSTOM, stack_with_mask
from weft.router.combine.layout import CONCAT, STACK
from weft.router.combine.method import CombineMethod, CombineSettings
from weft.router.combine.numbers import AVERAGE, MAX, MEDIAN, MIN, SUM
from weft.router.combine.vote import VOTE

#: By the names of the values of ``Combine.Method`` in ``graph.proto``.
METHODS: dict[str, CombineMethod] = {
    method.name: method for method in (KEYED, VOTE, AVERAGE, MEDIAN, SUM, MIN, MAX, CONCAT, STACK, FIRST, CUSTOM, MERGE)
}

__all__ = ["METHODS", "CombineMethod", "CombineSettings", "stack_with_mask"]
