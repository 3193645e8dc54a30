"""What a node does, in words and edges: whatever shows a graph renders this, and knows no kind of node.

A kind describes the nodes of its own (``NodePlan.describe``); texts are whole, whoever shows them cuts them.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

from weft.language.plan import Binding, CallPlan, Condition, Flow, NodePlan, StepPlan, TensorUse


def given(step: StepPlan) -> tuple[TensorUse, ...]:
    """What a step and its fallbacks take as inputs; each slot once."""
    found: dict[int, TensorUse] = {}
    for binding in _bindings(step):
        found.setdefault(binding.slot, TensorUse(binding.slot, taken_as=binding.name))
    return tuple(found.values())


def offered(step: StepPlan) -> tuple[TensorUse, ...]:
    """Every output of a step."""
    return tuple(TensorUse(binding.slot, given_as=binding.name) for binding in step.outputs)


def shadow_flows(plan: NodePlan) -> Iterator[Flow]:
    """Flows to shadows that stand beside the steps."""
    for index, shadow in enumerate(plan.shadows, start=len(plan.steps)):
        yield Flow(None, index, tensors=given(shadow))


def condition_text(condition: Condition) -> str:
    """The author's text on one line."""
    return " ".join(condition.source.split())


def when_notes(step: StepPlan) -> tuple[str, ...]:
    """``when inputs.X > 1``, where the step has a ``when``."""
    return (f"when {condition_text(step.when)}",) if step.when is not None else ()


def target_text(action: CallPlan | NodePlan) -> str:
    """``resnet50@3``, ``resnet50`` where the version is left to the target, ``graph inner/7`` or ``node ab``."""
    if isinstance(action, CallPlan):
        return action.model_name + (f"@{action.model_version}" if action.model_version else "")
    return f"graph {action.graph}" if action.graph else f"node {action.name}"


def slot_name(node: NodePlan, slot: int) -> str:
    """Name of the tensor in a slot of the node's frame; "" where it has none."""
    spec = node.specs.get(slot)
    if spec is not None:
        return spec.name
    return next((binding.name for binding in (*node.inputs, *node.outputs) if binding.slot == slot), "")


def share(weight: float, total: float) -> str:
    """``90 %``; never 0 % or 100 % of something that is not."""
    percent = 100 * weight / total if total > 0 else 0.0
    text = f"{percent:.3g}"
    if text == "100" and weight < total:
        return "> 99.9 %"
    return f"{text} %" if text != "0" or not weight else "< 0.01 %"


def counted(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cases_text(cases: Sequence[str]) -> str:
    """``"de", "nl"``."""
    return ", ".join(json.dumps(case, ensure_ascii=False) for case in cases)


def _bindings(step: StepPlan | None) -> Iterable[Binding]:
    while step is not None:
        yield from step.inputs
        step = step.fallback
