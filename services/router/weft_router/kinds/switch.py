"""A switch: alternatives, of which the first whose case or test holds gives the node's outputs."""

from weft_router.graph.description import (
    Description,
    End,
    Flow,
    cases_text,
    condition_text,
    given,
    offered,
    shadow_flows,
)
from weft_router.graph.plan import NodePlan, StepPlan


def describe_switch(plan: NodePlan) -> Description:
    """The test of each branch."""
    flows: list[Flow] = []
    for index, step in enumerate(plan.steps):
        flows.append(Flow(None, index, (_test_text(step),), given(step)))
        flows.append(Flow(index, None, tensors=offered(step), gives=True))
    return Description(
        kind="switch",
        steps=(*plan.steps, *plan.shadows),
        entry=End(
            "each row: first that holds" if plan.per_row else "first that holds",
            (f"on {condition_text(plan.on)}",) if plan.on is not None else (),
        ),
        exit=End("rows in order again" if plan.per_row else "its answer"),
        flows=(*flows, *shadow_flows(plan)),
    )


def _test_text(step: StepPlan) -> str:
    if step.is_otherwise:
        return "otherwise"
    if step.when is not None:
        return f"when {condition_text(step.when)}"
    return f"case {cases_text(step.cases)}"
