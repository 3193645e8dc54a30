"""A cascade: alternatives that run one after another until an answer is accepted."""

from collections.abc import Iterator

from weft_router.graph.description import (
    Description,
    End,
    Flow,
    condition_text,
    given,
    offered,
    shadow_flows,
    when_notes,
)
from weft_router.graph.plan import NodePlan


def describe_cascade(plan: NodePlan) -> Description:
    """The steps in order, and what is accepted."""
    return Description(
        kind="cascade",
        steps=(*plan.steps, *plan.shadows),
        entry=End("each row: in order until accepted" if plan.per_row else "in order until accepted"),
        exit=End("first accepted, else the last answer"),
        flows=(*_flows(plan), *shadow_flows(plan)),
    )


def _flows(plan: NodePlan) -> Iterator[Flow]:
    onward: list[str] = []
    for index, step in enumerate(plan.steps):
        is_last = index == len(plan.steps) - 1
        yield Flow(index - 1 if index else None, index, (*onward, *when_notes(step)), given(step))
        accept = (f"accept {condition_text(step.accept)}",) if step.accept is not None and not is_last else ()
        yield Flow(index, None, accept, offered(step), gives=True)
        onward = ["not accepted, or failed" if step.is_soft else "not accepted"]
