"""Combine methods: how an ensemble makes one tensor of those of its steps."""

from weft.router.combine.method import CombineMethod, CombineSettings
from weft.router.combine.methods import (
    AVERAGE,
    CONCAT,
    CUSTOM,
    FIRST,
    KEYED,
    MAX,
    MEDIAN,
    MERGE,
    MIN,
    STACK,
    SUM,
    VOTE,
    stack_with_mask,
)

#: By the names of the values of ``Combine.Method`` in ``graph.proto``.
METHODS: dict[str, CombineMethod] = {
    method.name: method for method in (KEYED, VOTE, AVERAGE, MEDIAN, SUM, MIN, MAX, CONCAT, STACK, FIRST, CUSTOM, MERGE)
}

__all__ = ["METHODS", "CombineMethod", "CombineSettings", "stack_with_mask"]
