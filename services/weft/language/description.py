"""What a node does, in words and edges: whatever shows a graph renders this, and knows no kind of node.

A kind describes the nodes of its own (``NodePlan.describe``); texts are whole, whoever shows them cuts them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.language.plan import Binding, CallPlan, Condition, NodePlan, StepPlan

#: Note of a flow along which nothing passes: its target waits for the end of its source.
THEN = "then"


class TensorUse(NamedTuple):
    """A tensor that goes along a flow.

    Attributes:
        slot: Of the node's frame.
        given_as: What the target of the step that gives it calls it; "" where no step does.
        taken_as: What the target of the step that takes it calls it; "" where no step does.
        condition: Where only a condition of the step reads it: how the condition names it, and which one it is.
    """

    slot: int
    given_as: str = ""
    taken_as: str = ""
    condition: str = ""


class Flow(NamedTuple):
    """From one place in a node to another.

    Attributes:
        source: Index in ``Description.steps``; None: where the node is entered.
        target: Index in ``Description.steps``; None: where the node is left.
        notes: When it is taken: ``when inputs.X > 1``, ``60 %``.
        tensors: What goes along it.
        gives: Whether the tensors are outputs of the source, so that they may be missing where that is soft.
        is_back: From where the node is left to where it is entered, for another round; ``source`` and ``target`` are
            None.
    """

    source: int | None
    target: int | None
    notes: tuple[str, ...] = ()
    tensors: tuple[TensorUse, ...] = ()
    gives: bool = False
    is_back: bool = False


class End(NamedTuple):
    """Where a node is entered or left.

    Attributes:
        title: How it chooses or combines: ``first that holds``.
        notes: The details: ``on text(inputs.LANG)``.
        is_plain: It only passes tensors on.
    """

    title: str
    notes: tuple[str, ...] = ()
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """One node.

    Attributes:
        kind: The word for its kind.
        steps: The steps of the plan, its shadows, and its custom steps.
        entry, exit: Where it is entered and left.
        flows: Between these; without those that are ``is_back`` there is no cycle.
        notes: Of the node as a whole.
        step_notes: Index of a step -> what the kind says of the step itself, beside its policies.
        names: Slot -> name of its tensor, where that is not the one of ``NodePlan.specs``.
        maybe_absent: Slots that a request may leave without a tensor, beside those whose spec is optional.
        each: What the steps run once for, where only the data says how many there are: ``chunk of CROPS``.
    """

    kind: str
    steps: tuple[StepPlan, ...]
    entry: End
    exit: End
    flows: tuple[Flow, ...]
    notes: tuple[str, ...] = ()
    step_notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    maybe_absent: frozenset[int] = frozenset()
    each: str = ""

    def waits_of(self, index: int) -> list[str]:
        """What a step waits for beside its tensors, and whether the answer of the node waits for it, in words."""
        waits = [(flow.source, flow.target) for flow in self.flows if THEN in flow.notes]
        before = [self.steps[source].name for source, target in waits if target == index and source is not None]
        told = [f"after {', '.join(before)}"] if before else []
        return told + ["the answer waits for it"] * ((index, None) in waits)

    def notes_to(self, index: int) -> list[str]:
        """What is said on the flows to a step: when it runs, and how often."""
        return [note for flow in self.flows if flow.target == index for note in flow.notes]


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
