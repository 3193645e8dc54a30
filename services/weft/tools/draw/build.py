"""From a plan to the diagram that shows it."""

from collections.abc import Iterable
from dataclasses import replace

from weft.language.description import slot_name, target_text
from weft.language.plan import CallPlan, Description, End, GraphPlan, NodePlan, StepPlan, TensorUse
from weft.tools.draw.diagram import Edge, Group, Item, Role, Stroke
from weft.tools.wording import default_texts, limit_texts, policy_texts, shortened, tensor_text


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


#: More lines than that are counted instead.
MAX_LINES = 8


class Caption:
    """Lines in the order added; each is cut, the whole text is kept beside it."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def add(self, *texts: str) -> None:
        """Add lines; one that is there already is not repeated."""
        self._texts += [text for text in texts if text and text not in self._texts]

    @property
    def lines(self) -> list[str]:
        """What is shown."""
        shown = [shortened(text) for text in self._texts]
        rest = len(shown) - MAX_LINES
        return shown if rest <= 1 else [*shown[:MAX_LINES], f"and {rest} more"]

    @property
    def tooltip(self) -> str:
        """Every line in full, or "" where ``lines`` says it all."""
        return "" if self.lines == self._texts else "\n".join(self._texts)


def build_diagram(plan: GraphPlan) -> Group:
    """The graph as one group: a box for each node and step, an edge wherever tensors pass."""
    signature = plan.signature
    is_batched = signature.max_batch_size > 0
    notes = limit_texts(plan.timeout_ms, plan.max_inflight)
    if is_batched:
        notes.append(f"batch of at most {signature.max_batch_size}")
    if plan.cache is not None:
        notes.append(f"whole answers: {plan.cache.text()}")
    if signature.is_decoupled:
        notes.append("answers with a stream of responses")
    group = _DiagramBuilder(is_batched=is_batched).node(plan.root, f"{signature.name}/{signature.version}", notes)
    asks = [f"{tensor_text(t, is_batched=is_batched)}{', optional' * t.is_optional}" for t in signature.inputs]
    gives = [f"{tensor_text(t, is_batched=is_batched)}{', optional' * t.is_optional}" for t in signature.outputs]
    _retitle(group.items[0], "request", asks)
    _retitle(group.items[-1], "answer", gives)
    return group


def _retitle(item: Item | Group, title: str, tensors: Iterable[str]) -> None:
    """The graph's own entry or exit names its tensors."""
    caption = Caption(*tensors)
    is_replaced = isinstance(item, Item) and item.role is Role.TENSORS
    item.title = title if is_replaced else f"{title}: {item.title}"
    item.lines = [*caption.lines, *([] if is_replaced else item.lines)]
    item.tooltip = "\n".join(filter(None, [caption.tooltip, item.tooltip]))


class _Edges:
    """Edges of one node, one for each pair of ends."""

    def __init__(self) -> None:
        self._edges: dict[tuple[str, str], tuple[Caption, Stroke, bool]] = {}

    def connect(self, source: str, target: str, texts: Iterable[str], stroke: Stroke, *, is_back: bool = False) -> None:
        """An edge; texts of a second call for the same pair are added. The last stroke that is not solid counts."""
        caption, before, _ = self._edges.setdefault((source, target), (Caption(), Stroke.SOLID, is_back))
        caption.add(*texts)
        self._edges[source, target] = (caption, before if stroke is Stroke.SOLID else stroke, is_back)

    def drawn(self) -> list[Edge]:
        """All of them."""
        return [
            Edge(source, target, caption.lines, caption.tooltip, stroke, is_back)
            for (source, target), (caption, stroke, is_back) in self._edges.items()
        ]


class _DiagramBuilder:
    def __init__(self, *, is_batched: bool) -> None:
        self._is_batched = is_batched
        self._num_ids = 0

    def node(self, node: NodePlan, title: str, notes: Iterable[str], stroke: Stroke = Stroke.SOLID) -> Group:
        description = node.describe()
        caption = Caption(*notes)
        caption.add(*limit_texts(node.timeout_ms, node.max_inflight), *description.notes)
        group = Group(self._id(), title, description.kind, stroke=stroke)
        group.lines, group.tooltip = caption.lines, caption.tooltip
        entry, leave = self._end(description.entry, Role.CHOICE), self._end(description.exit, Role.MERGE)
        boxes = [self.step(step, node, description, index) for index, step in enumerate(description.steps)]
        group.items = [entry, *boxes, leave]
        group.edges = self._edges(node, description, entry, boxes, leave)
        return group

    def _edges(
        self, node: NodePlan, description: Description, entry: Item, boxes: list[Item | Group], leave: Item
    ) -> list[Edge]:
        tensors = Tensors(node, description, is_batched=self._is_batched)
        edges = _Edges()
        for flow in description.flows:
            texts = [*flow.notes, *(tensors.label(use) for use in flow.tensors)]
            if flow.is_back:
                edges.connect(leave.id, entry.id, texts, Stroke.SOLID, is_back=True)
                continue
            source = entry if flow.source is None else boxes[flow.source]
            target = leave if flow.target is None else boxes[flow.target]
            stroke = _stroke(description.steps[flow.source]) if flow.gives and flow.source is not None else Stroke.SOLID
            if flow.target is not None and description.steps[flow.target].shadow is not None:
                stroke = Stroke.DOTTED
            edges.connect(source.id, target.id, texts, stroke)
        return edges.drawn()

    def _end(self, end: End, role: Role) -> Item:
        caption = Caption(*end.notes)
        return Item(self._id(), end.title, caption.lines, caption.tooltip, Role.TENSORS if end.is_plain else role)

    def step(self, step: StepPlan, node: NodePlan, description: Description, index: int) -> Item | Group:
        """The box of a step; with a fallback, a box around both."""
        notes = description.step_notes.get(index, ())
        first = self._plain(step, node, notes)
        if step.fallback is None:
            return first
        caption = Caption("if it fails, what stands below")
        group = Group(self._id(), step.name, "fallback", caption.lines, stroke=_stroke(step), items=[first])
        below: StepPlan | None = step.fallback
        while below is not None:
            box = self._plain(below, node, ())
            group.edges.append(Edge(group.items[-1].id, box.id, ["on error"], stroke=Stroke.DASHED))
            group.items.append(box)
            below = below.fallback
        return group

    def _plain(self, step: StepPlan, node: NodePlan, notes: Iterable[str]) -> Item | Group:
        caption = Caption()
        if step.shadow is not None:
            caption.add(step.shadow.text())
        if step.is_soft:
            caption.add("soft: goes on without it")
        action = step.action
        if action.streams:
            caption.add("streams")
        caption.add(*default_texts(step, node), *policy_texts(step), *notes)
        if isinstance(action, NodePlan):
            label = action.graph or action.name
            title = step.name if step.name == label else f"{step.name}: {label}"
            return self.node(action, title, caption.lines, _stroke(step))
        item = Item(self._id(), step.name, stroke=_stroke(step))
        item.lines = [target_text(action), *caption.lines]
        served = f"model {action.signature.name}, version {action.signature.version} as compiled, on '{action.target}'"
        item.tooltip = "\n".join(filter(None, [served, caption.tooltip]))
        return item

    def _id(self) -> str:
        self._num_ids += 1
        return f"n{self._num_ids}"


def _stroke(step: StepPlan) -> Stroke:
    if step.shadow is not None:
        return Stroke.DOTTED
    return Stroke.DASHED if step.is_soft else Stroke.SOLID
