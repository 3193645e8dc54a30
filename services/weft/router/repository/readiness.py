"""Which models of a graph must be ready for it to answer; those that it can do without need not be."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from weft.language.plan import CallPlan, NodePlan, StepPlan

IsReady = Callable[[CallPlan], bool]


class Missing(NamedTuple):
    """A step and its call of a model that is not ready."""

    step: StepPlan
    call: CallPlan


def missing_call(node: NodePlan, is_ready: IsReady) -> Missing | None:
    """A call that keeps the node from answering some request; None if there is none.

    A step can do without its model if one of its fallbacks is ready, a node without a step that is soft, as long as
    there are answers enough. Shadows do not count. Every step that may be chosen to answer for the others is needed.

    Args:
        node: The node, the graph's root for example.
        is_ready: Whether a model is ready.
    """
    for custom in node.customs:
        if (missing := _missing_of(custom, is_ready)) is not None:
            return missing
    steps = {index: _missing_of(step, is_ready) for index, step in enumerate(node.steps) if step.shadow is None}
    lost = node.first_lost([index for index, missing in steps.items() if missing is not None])
    return None if lost is None else steps[lost]


def borne_calls(node: NodePlan, is_ready: IsReady) -> list[Missing]:
    """Calls that cannot be made and that the node answers without, as if nothing of it were ``missing_call``.

    Args:
        node: The node, the graph's root for example.
        is_ready: Whether a model is ready.
    """
    return [
        Missing(step, step.action)
        for _, step in steps_of(node)
        if step.shadow is None and isinstance(step.action, CallPlan) and not is_ready(step.action)
    ]


def steps_of(node: NodePlan) -> Iterator[tuple[NodePlan, StepPlan]]:
    """Every step under a node with the node that it is in: of nested nodes, fallbacks, custom steps and shadows too."""
    for step in (*node.steps, *node.customs, *node.shadows):
        one: StepPlan | None = step
        while one is not None:
            yield node, one
            if isinstance(one.action, NodePlan):
                yield from steps_of(one.action)
            one = one.fallback


def _missing_of(step: StepPlan, is_ready: IsReady) -> Missing | None:
    """A call without which the step cannot answer: its own, if its fallbacks cannot answer either."""
    if isinstance(step.action, CallPlan):
        missing = None if is_ready(step.action) else Missing(step, step.action)
    else:
        missing = missing_call(step.action, is_ready)
    if missing is None or step.fallback is None:
        return missing
    return missing if _missing_of(step.fallback, is_ready) is not None else None
