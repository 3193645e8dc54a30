"""Labels of the tensors in a node's frame."""

from dataclasses import replace

from weft.language.description import slot_name
from weft.language.plan import CallPlan, Description, NodePlan, TensorUse
from weft.tools.wording import tensor_text


class Tensors:
    """Tensors of one node, as edges name them.

    Args:
        node: The node.
        description: Of the node.
        is_batched: Whether the graph has a batch dimension. A tensor lacks it all the same where a model that has none
            gives it.
    """

    def __init__(self, node: NodePlan, description: Description, *, is_batched: bool) -> None:
        self._node = node
        self._specs = dict(node.specs)
        for slot, name in description.names.items():
            self._specs[slot] = replace(self._specs[slot], name=name)
        self._unbatched = set() if is_batched else set(range(node.num_slots))
        self._unsure = {slot for slot, spec in node.specs.items() if spec.is_optional} | description.maybe_absent
        for step in node.steps:
            if isinstance(step.action, CallPlan) and not step.action.signature.max_batch_size:
                self._unbatched |= {binding.slot for binding in step.outputs}

    def label(self, use: TensorUse) -> str:
        """``OUT → image FP32 [batch, 3] → X``: the producer's name and the consumer's only where they differ.

        A tensor that may be absent says so.
        """
        if use.condition:
            return use.condition
        spec = self._specs.get(use.slot)
        name = spec.name if spec is not None else slot_name(self._node, use.slot)
        text = name if spec is None else tensor_text(spec, is_batched=use.slot not in self._unbatched)
        before = f"{use.given_as} → " if use.given_as not in ("", name) else ""
        after = f" → {use.taken_as}" if use.taken_as not in ("", name) else ""
        return f"{before}{text}{after}{' (may be absent)' * (use.slot in self._unsure)}"
