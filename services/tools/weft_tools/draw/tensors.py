"""Labels of the tensors in a node's frame."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from weft_router.graph.plan import Binding, CallPlan, NodeKind, NodePlan, StepPlan
from weft_tools.wording import slot_name, tensor_text


class Read(NamedTuple):
    """A slot that a step reads: for an input of its target, or, as ``condition`` says, for one of its conditions."""

    slot: int
    target_input: str = ""
    condition: str = ""


class Tensors:
    """Tensors of one node, as edges name them.

    Args:
        node: The node.
        is_batched: Whether the graph has a batch dimension. A tensor lacks it all the same where a model that has none
            gives it.
    """

    def __init__(self, node: NodePlan, *, is_batched: bool) -> None:
        self._node = node
        self._specs = dict(node.specs)
        if node.kind is NodeKind.ENSEMBLE:  # the frame keeps tensors of the same name apart: gnn.SCORE
            for step in node.steps:
                for _, slot in step.outputs:
                    if spec := node.specs.get(slot):
                        self._specs[slot] = replace(spec, name=spec.name.removeprefix(f"{step.name}."))
        self._unbatched = set() if is_batched else set(range(node.num_slots))
        self._unsure = {slot for slot, spec in node.specs.items() if spec.is_optional}
        for step in node.steps:
            action, defaults = step.action, {default.slot for default in step.defaults}
            slots = {binding.slot for binding in step.outputs}
            if isinstance(action, CallPlan) and not action.signature.max_batch_size:
                self._unbatched |= slots
            if node.kind is NodeKind.SEQUENCE and (step.is_soft or step.when is not None):
                self._unsure |= slots - defaults

    def label(self, slot: int, *, source: str = "", target: str = "") -> str:
        """``OUT → image FP32 [batch, 3] → X``: the producer's name and the consumer's only where they differ.

        A tensor that may be absent says so.
        """
        spec = self._specs.get(slot)
        name = spec.name if spec is not None else slot_name(self._node, slot)
        text = name if spec is None else tensor_text(spec, is_batched=slot not in self._unbatched)
        before = f"{source} → " if source not in ("", name) else ""
        after = f" → {target}" if target not in ("", name) else ""
        return f"{before}{text}{after}{' (may be absent)' * (slot in self._unsure)}"

    def read(self, read: Read, *, source: str = "") -> str:
        """Label of what a step reads."""
        if read.condition:
            return read.condition
        return self.label(read.slot, source=source, target=read.target_input)

    def offered(self, step: StepPlan) -> list[str]:
        """Labels of every output of a step."""
        return [self.label(binding.slot, source=binding.name) for binding in step.outputs]


def source_name(step: StepPlan, slot: int) -> str:
    """What the step's target calls the tensor in a slot; "" where it gives none."""
    return next((binding.name for binding in step.outputs if binding.slot == slot), "")


def reads(step: StepPlan, kind: NodeKind) -> list[Read]:
    """What a step reads, its fallbacks included, and in a sequence its conditions; each slot once."""
    found: dict[int, Read] = {}
    for binding in _bindings(step):
        found.setdefault(binding.slot, Read(binding.slot, binding.name))
    key = step.cache.key if step.cache is not None else None
    for what, condition in (("when", step.when), ("cache key", key)):
        if kind is NodeKind.SEQUENCE and condition is not None:
            for binding in condition.tensors:
                found.setdefault(binding.slot, Read(binding.slot, condition=f"{binding.name} (for {what})"))
    return list(found.values())


def _bindings(step: StepPlan | None) -> Iterator[Binding]:
    while step is not None:
        yield from step.inputs
        step = step.fallback
