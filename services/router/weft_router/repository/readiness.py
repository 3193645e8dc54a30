"""Which models of a graph must be ready for it to answer; those that it can do without need not be."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from weft_router.graph.plan import CallPlan, NodeKind, NodePlan, StepPlan

IsReady = Callable[[CallPlan], bool]


class Missing(NamedTuple):
    """A step and its call of a model that is not ready."""

    step: StepPlan
    call: CallPlan


def missing_call(node: NodePlan, is_ready: IsReady) -> Missing | None:
    """A call that keeps the node from answering some request; None if there is none.

    A step can do without its model if one of its fallbacks is ready, a node without a step that is soft, as long as
    there are answers enough. Shadows do not count. Every branch of a switch or splitter is needed.

    Args:
        node: The node, the graph's root for example.
        is_ready: Whether a model is ready.
    """
    steps = [(step, _missing_of(step, is_ready)) for step in node.steps if step.shadow is None]
    customs = [_missing_of(combine.custom, is_ready) for combine in node.combines if combine.custom is not None]
    hard = [missing for step, missing in steps if not step.is_soft]
    missing = [missing for _, missing in steps if missing is not None]
    match node.kind:
        case NodeKind.SEQUENCE:
            return _first(hard)
        case NodeKind.SWITCH | NodeKind.SPLITTER:
            return _first(missing)
        case NodeKind.ENSEMBLE | NodeKind.CASCADE:
            too_few = missing if len(steps) - len(missing) < max(node.quorum, 1) else []
            return _first([*customs, *([] if node.is_race else hard), *too_few])


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
    """Every step under a node with the node that it is in: of nested nodes, fallbacks, combines and shadows too."""
    customs = (combine.custom for combine in node.combines if combine.custom is not None)
    for step in (*node.steps, *customs, *node.shadows):
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


def _first(found: Iterable[Missing | None]) -> Missing | None:
    return next((missing for missing in found if missing is not None), None)
