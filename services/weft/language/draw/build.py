"""Builds the boxes and edges of a graph's drawing, independent of the format."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from weft.language.description import (
    limit_texts,
    policy_texts,
    shortened,
    slot_name,
    target_text,
    tensor_text,
    value_texts,
)
from weft.language.plan import CallPlan, Description, End, GraphPlan, NodePlan, StepPlan, TensorUse


class Role(Enum):
    """The role of an item, which decides its shape."""

    STEP = "step"
    TENSORS = "tensors"
    CHOICE = "choice"
    MERGE = "merge"


class Stroke(Enum):
    """Line style: SOFT steps and paths after failures dashed, shadows dotted."""

    SOLID = "solid"
    DASHED = "dashed"
    DOTTED = "dotted"


@dataclass(slots=True)
class _Box:
    """What an item and a group have.

    Attributes:
        id: Unique in the drawing, letters and digits.
        lines: Small text below it.
        tooltip: The full text, lines ended by newlines; "" if nothing is shortened.
        path: Of the step that it stands for; "" of other boxes.
        mark: "added", "removed" or "changed" in a picture of two graphs.
    """

    id: str
    title: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    stroke: Stroke = Stroke.SOLID
    path: str = ""
    mark: str = ""


@dataclass(slots=True)
class Item(_Box):
    """A box without inner boxes."""

    role: Role = Role.STEP


@dataclass(slots=True)
class Edge:
    """An edge between two boxes of one group, by their ids, with condition and tensors in ``lines``.

    ``is_back``: it closes a loop, against the direction of all others.
    """

    source: str
    target: str
    lines: list[str] = field(default_factory=list)
    tooltip: str = ""
    stroke: Stroke = Stroke.SOLID
    is_back: bool = False


@dataclass(slots=True)
class Group(_Box):
    """A box with inner boxes: a node, or a step with its fallback.

    Attributes:
        kind: "sequence", "switch", "splitter", "ensemble", "cascade", "fallback" or "versions".
        items: In declared order; the first is the entry of the group, the last its exit.
        edges: Between its items; acyclic without those that are ``is_back``.
    """

    kind: str = field(kw_only=True)
    items: "list[Item | Group]" = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def boxes(self) -> "Iterator[Item | Group]":
        """This group and everything in it, outermost first."""
        yield self
        for item in self.items:
            if isinstance(item, Group):
                yield from item.boxes()
            else:
                yield item


#: More lines than that are counted instead.
MAX_LINES = 8


class Caption:
    """Lines of text, shortened for display; keeps the full text."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def add(self, *texts: str) -> None:
        """Add lines, without duplicates."""
        self._texts += [text for text in texts if text and text not in self._texts]

    @property
    def lines(self) -> list[str]:
        """The shortened lines."""
        shown = [shortened(text) for text in self._texts]
        rest = len(shown) - MAX_LINES
        return shown if rest <= 1 else [*shown[:MAX_LINES], f"and {rest} more"]

    @property
    def tooltip(self) -> str:
        """Every line in full, or "" if none was shortened."""
        return "" if self.lines == self._texts else "\n".join(self._texts)


def build_diagram(plan: GraphPlan, prefix: str = "n") -> Group:
    """The graph as one group: a box for each node and step, an edge wherever tensors pass; ``prefix`` of its ids."""
    signature = plan.signature
    is_batched = signature.max_batch_size > 0
    notes = limit_texts(plan.timeout_ms, plan.max_inflight)
    if is_batched:
        notes.append(f"batch of at most {signature.max_batch_size}")
    if plan.cache is not None:
        notes.append(f"whole answers: {plan.cache.text()}")
    if signature.is_decoupled:
        notes.append("answers with a stream of responses")
    group = _DiagramBuilder(prefix, is_batched=is_batched).node(
        plan.root, f"{signature.name}/{signature.version}", notes
    )
    for item, title, specs in (
        (group.items[0], "request", signature.inputs),
        (group.items[-1], "answer", signature.outputs),
    ):
        caption = Caption(*(f"{tensor_text(t, is_batched=is_batched)}{', optional' * t.is_optional}" for t in specs))
        is_replaced = isinstance(item, Item) and item.role is Role.TENSORS
        item.title = title if is_replaced else f"{title}: {item.title}"
        item.lines = [*caption.lines, *([] if is_replaced else item.lines)]
        item.tooltip = "\n".join(filter(None, [caption.tooltip, item.tooltip]))
    return group


def build_both(before: GraphPlan, after: GraphPlan, marks: Mapping[str, str]) -> Group:
    """Two graphs side by side; ``marks`` by path of a step."""
    both = Group("n0", "before and after", kind="versions")
    for when, group in (("before", build_diagram(before, "b")), ("after", build_diagram(after))):
        group.title = f"{when}: {group.title}"
        both.items.append(group)
    for box in both.boxes():
        if box.path in marks:
            box.mark = marks[box.path]
            box.title += f" ({box.mark})"
    return both


class _DiagramBuilder:
    def __init__(self, prefix: str, *, is_batched: bool) -> None:
        self._prefix = prefix
        self._is_batched = is_batched
        self._num_ids = 0

    def node(self, node: NodePlan, title: str, notes: Iterable[str], stroke: Stroke = Stroke.SOLID) -> Group:
        description = node.describe()
        caption = Caption(*notes)
        caption.add(*limit_texts(node.timeout_ms, node.max_inflight), *description.notes)
        group = Group(self._id(), title, caption.lines, caption.tooltip, stroke, kind=description.kind)
        entry, leave = self._end(description.entry, Role.CHOICE), self._end(description.exit, Role.MERGE)
        boxes = [self._step(step, node, description, index) for index, step in enumerate(description.steps)]
        group.items = [entry, *boxes, leave]
        group.edges = self._edges(node, description, [item.id for item in group.items])
        return group

    def _edges(self, node: NodePlan, description: Description, ids: list[str]) -> list[Edge]:
        """One for each pair of ends; the last stroke that is not solid counts. ``ids`` begin and end with the ends."""
        labels = _TensorLabels(node, description, is_batched=self._is_batched)
        edges: dict[tuple[str, str], tuple[Caption, Edge]] = {}
        for flow in description.flows:
            source = ids[0] if flow.source is None else ids[flow.source + 1]
            target = ids[-1] if flow.target is None else ids[flow.target + 1]
            stroke = Stroke.SOLID
            if flow.is_back:
                source, target = target, ids[0]
            elif flow.target is not None and description.steps[flow.target].shadow is not None:
                stroke = Stroke.DOTTED
            elif flow.gives and flow.source is not None:
                stroke = _stroke(description.steps[flow.source])
            new = Caption(), Edge(source, target, is_back=flow.is_back)
            caption, edge = edges.setdefault((source, target), new)
            caption.add(*flow.notes, *map(labels.of, flow.tensors))
            edge.lines, edge.tooltip = caption.lines, caption.tooltip
            edge.stroke = edge.stroke if stroke is Stroke.SOLID else stroke
        return [edge for _, edge in edges.values()]

    def _end(self, end: End, role: Role) -> Item:
        caption = Caption(*end.notes)
        shown = Role.TENSORS if end.is_plain else role
        return Item(self._id(), end.title, caption.lines, caption.tooltip, role=shown)

    def _step(self, step: StepPlan, node: NodePlan, description: Description, index: int) -> Item | Group:
        """The box of a step; with a fallback, a box around both."""
        first = self._plain(step, node, description.step_notes.get(index, ()))
        if step.fallback is None:
            return first
        lines = Caption("if it fails, what stands below").lines
        group = Group(self._id(), step.name, lines, "", _stroke(step), step.path, kind="fallback", items=[first])
        for below in step.fallback.chain():
            box = self._plain(below, node, ())
            group.edges.append(Edge(group.items[-1].id, box.id, ["on error"], stroke=Stroke.DASHED))
            group.items.append(box)
        return group

    def _plain(self, step: StepPlan, node: NodePlan, notes: Iterable[str]) -> Item | Group:
        caption, action = Caption(), step.action
        caption.add(
            step.shadow.text() if step.shadow is not None else "",
            "soft: goes on without it" if step.is_soft else "",
            "streams" if action.streams else "",
            *value_texts(step, node),
            *policy_texts(step),
            *notes,
        )
        if isinstance(action, NodePlan):
            label = action.graph or action.name
            title = step.name if step.name == label else f"{step.name}: {label}"
            group = self.node(action, title, caption.lines, _stroke(step))
            group.path = step.path
            return group
        item = Item(self._id(), step.name, [target_text(action), *caption.lines], stroke=_stroke(step), path=step.path)
        served = f"model {action.signature.name}, version {action.signature.version} as compiled, on '{action.target}'"
        item.tooltip = "\n".join(filter(None, [served, caption.tooltip]))
        return item

    def _id(self) -> str:
        self._num_ids += 1
        return f"{self._prefix}{self._num_ids}"


class _TensorLabels:
    """Tensors of one node, as edges name them.

    One lacks the batch dimension of the graph where a model that has none gives it.
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

    def of(self, use: TensorUse) -> str:
        """``OUT → image FP32 [batch, 3] → X``: the producer's name and the consumer's only where they differ."""
        if use.condition:
            return use.condition
        spec = self._specs.get(use.slot)
        name = spec.name if spec is not None else slot_name(self._node, use.slot)
        text = name if spec is None else tensor_text(spec, is_batched=use.slot not in self._unbatched)
        before = f"{use.given_as} → " if use.given_as not in ("", name) else ""
        after = f" → {use.taken_as}" if use.taken_as not in ("", name) else ""
        return f"{before}{text}{after}{' (may be absent)' * (use.slot in self._unsure)}"


def _stroke(step: StepPlan) -> Stroke:
    if step.shadow is not None:
        return Stroke.DOTTED
    return Stroke.DASHED if step.is_soft else Stroke.SOLID
