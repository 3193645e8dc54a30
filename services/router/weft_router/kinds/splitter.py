"""A splitter: alternatives, of which one is drawn by weight, or chosen by what feedback has taught."""

from weft_router.graph.description import (
    Description,
    End,
    Flow,
    condition_text,
    counted,
    given,
    offered,
    shadow_flows,
    share,
)
from weft_router.graph.plan import BanditPlan, NodePlan


def describe_splitter(plan: NodePlan) -> Description:
    """The share of each step."""
    total = sum(step.weight for step in plan.steps)
    flows: list[Flow] = []
    for index, step in enumerate(plan.steps):
        flows.append(Flow(None, index, (share(step.weight, total),), given(step)))
        flows.append(Flow(index, None, tensors=offered(step), gives=True))
    notes = [
        *([f"sticky by {condition_text(plan.sticky_by)}"] if plan.sticky_by is not None else []),
        *([f"salt {plan.salt}"] if plan.salt else []),
        *(_bandit_notes(plan.bandit) if plan.bandit is not None else []),
    ]
    return Description(
        kind="splitter",
        steps=(*plan.steps, *plan.shadows),
        entry=End("one by weight" if plan.bandit is None else "one by feedback", tuple(notes)),
        exit=End("its answer"),
        flows=(*flows, *shadow_flows(plan)),
    )


def _bandit_notes(bandit: BanditPlan) -> list[str]:
    notes = [f"{bandit.algorithm.name}{f', epsilon {bandit.epsilon:g}' * bandit.algorithm.takes_epsilon}"]
    if bandit.min_pulls:
        notes.append(f"first {counted(bandit.min_pulls, 'request')} for each by weight")
    return notes
