"""From a plan to the diagram that shows it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weft_router.graph.plan import GraphPlan, LoopPlan, NodeKind, NodePlan, StepPlan
from weft_tools.draw.caption import Caption
from weft_tools.draw.diagram import Edge, Group, Item, Stroke
from weft_tools.draw.ends import entry_item, exit_item
from weft_tools.draw.tensors import Tensors, reads, source_name
from weft_tools.wording import (
    cache_text,
    cases_text,
    condition_text,
    counted,
    default_texts,
    limit_texts,
    policy_texts,
    shadow_text,
    share,
    slot_name,
    target_text,
    tensor_text,
)


def build_diagram(plan: GraphPlan) -> Group:
    """The graph as one group: a box for each node and step, an edge wherever tensors pass."""
    signature = plan.signature
    is_batched = signature.max_batch_size > 0
    notes = limit_texts(plan.timeout_ms, plan.max_inflight)
    if is_batched:
        notes.append(f"batch of at most {signature.max_batch_size}")
    if plan.cache is not None:
        notes.append(f"whole answers: {cache_text(plan.cache)}")
    if plan.max_inflight_responses:
        notes.append(f"at most {counted(plan.max_inflight_responses, 'response')} of a stream in work")
    builder = _DiagramBuilder(is_batched=is_batched)
    frame = _Frame(plan.root, Tensors(plan.root, is_batched=is_batched))
    group = builder.node(frame, f"{signature.name}/{signature.version}", notes)
    asks = [f"{tensor_text(t, is_batched=is_batched)}{', optional' * t.is_optional}" for t in signature.inputs]
    gives = [tensor_text(t, is_batched=is_batched) for t in signature.outputs]
    _retitle(group.items[0], "request", asks, is_replaced=plan.root.kind is NodeKind.SEQUENCE)
    _retitle(group.items[-1], "answer", gives, is_replaced=plan.root.kind is NodeKind.SEQUENCE)
    return group


def _retitle(item: Item | Group, title: str, tensors: Iterable[str], *, is_replaced: bool) -> None:
    """The graph's own entry or exit names its tensors."""
    caption = Caption(*tensors)
    item.title = title if is_replaced else f"{title}: {item.title}"
    item.lines = [*caption.lines, *([] if is_replaced else item.lines)]
    item.tooltip = "\n".join(filter(None, [caption.tooltip, item.tooltip]))


@dataclass(slots=True)
class _Frame:
    """A node while it is drawn: its boxes and its edges, one for each pair of ends."""

    node: NodePlan
    tensors: Tensors
    boxes: list[Item | Group] = field(default_factory=list)
    edges: dict[tuple[str, str], tuple[Caption, Stroke, bool]] = field(default_factory=dict)

    def connect(
        self, source: Item | Group, target: Item | Group, texts: Iterable[str], *strokes: Stroke, is_back: bool = False
    ) -> None:
        """An edge; texts of a second call for the same pair are added. The last stroke that is not solid counts."""
        none = (Caption(), Stroke.SOLID, is_back)
        caption, stroke, _ = self.edges.setdefault((source.id, target.id), none)
        caption.add(*texts)
        stroke = next((one for one in reversed(strokes) if one is not Stroke.SOLID), stroke)
        self.edges[source.id, target.id] = (caption, stroke, is_back)

    def drawn_edges(self) -> list[Edge]:
        """All of them."""
        return [
            Edge(source, target, caption.lines, caption.tooltip, stroke, is_back)
            for (source, target), (caption, stroke, is_back) in self.edges.items()
        ]


class _DiagramBuilder:
    def __init__(self, *, is_batched: bool) -> None:
        self._is_batched = is_batched
        self._num_ids = 0

    def node(self, frame: _Frame, title: str, notes: Iterable[str], stroke: Stroke = Stroke.SOLID) -> Group:
        node = frame.node
        caption = Caption(*notes)
        caption.add(*limit_texts(node.timeout_ms, node.max_inflight))
        group = Group(self._id(), title, node.kind.value, stroke=stroke)
        entry, leave = entry_item(node, self._id()), exit_item(node, self._id())
        steps = [self.step(step, frame) for step in node.steps]
        shadows = [self.step(step, frame) for step in node.shadows]
        customs = self._customs(node)
        match node.kind:
            case NodeKind.SEQUENCE:
                self._sequence(frame, entry, steps, leave)
                if node.loop is not None:
                    self._loop(frame, node.loop, entry, leave)
                    caption.add(f"at most {counted(node.loop.max_iterations, 'round')}")
            case NodeKind.CASCADE:
                self._cascade(frame, entry, steps, leave)
            case NodeKind.ENSEMBLE:
                self._ensemble(frame, entry, steps, customs, leave)
            case _:
                self._branches(frame, entry, steps, leave)
        for shadow, box in zip(node.shadows, shadows, strict=True):
            frame.connect(entry, box, _given(frame, shadow), Stroke.DOTTED)
        group.items = [entry, *steps, *shadows, *customs.values(), leave]
        group.edges = frame.drawn_edges()
        group.lines, group.tooltip = caption.lines, caption.tooltip
        return group

    def step(self, step: StepPlan, frame: _Frame) -> Item | Group:
        """The box of a step; with a fallback, a box around both."""
        if step.fallback is None:
            return self._plain(step, frame)
        first, stroke = self._plain(step, frame), _stroke(step)
        group = Group(self._id(), step.name, "fallback", stroke=stroke)
        group.items = [first]
        caption = Caption("if it fails, what stands below")
        group.lines = caption.lines
        below: StepPlan | None = step.fallback
        while below is not None:
            box = self._plain(below, frame)
            group.edges.append(Edge(group.items[-1].id, box.id, ["on error"], stroke=Stroke.DASHED))
            group.items.append(box)
            below = below.fallback
        return group

    def _plain(self, step: StepPlan, frame: _Frame) -> Item | Group:
        caption = Caption()
        if step.shadow is not None:
            caption.add(shadow_text(step.shadow))
        if step.is_soft:
            caption.add("soft: goes on without it")
        caption.add(*default_texts(step, frame.node), *policy_texts(step))
        if step.when is not None and frame.node.kind is NodeKind.SEQUENCE:
            caption.add(f"when {condition_text(step.when)}")
        action = step.action
        if isinstance(action, NodePlan):
            label = action.graph or action.name
            title = step.name if step.name == label else f"{step.name}: {label}"
            inner = _Frame(action, Tensors(action, is_batched=self._is_batched))
            return self.node(inner, title, caption.lines, _stroke(step))
        item = Item(self._id(), step.name, stroke=_stroke(step))
        item.lines = [target_text(action), *caption.lines]
        served = f"model {action.signature.name}, version {action.signature.version} as compiled, on '{action.target}'"
        item.tooltip = "\n".join(filter(None, [served, caption.tooltip]))
        return item

    def _sequence(self, frame: _Frame, entry: Item, steps: list[Item | Group], leave: Item) -> None:
        node = frame.node
        producers: dict[int, int] = {}
        for index, step in enumerate(node.steps):
            producers.update((binding.slot, index) for binding in step.outputs)
            if step.ok_slot >= 0:
                producers[step.ok_slot] = index
        for index, step in enumerate(node.steps):
            for read in reads(step, node.kind):
                source = producers.get(read.slot)
                giver = node.steps[source] if source is not None else None
                text = frame.tensors.read(read, source=source_name(giver, read.slot) if giver else "")
                box = entry if source is None else steps[source]
                frame.connect(box, steps[index], [text], _stroke(giver), _dotted(step))
        for index, step in enumerate(node.steps):
            for consumer in step.consumers:
                if (steps[index].id, steps[consumer].id) not in frame.edges:
                    frame.connect(steps[index], steps[consumer], ["then"])
        for binding in node.outputs:
            source = producers.get(binding.slot)
            giver = node.steps[source] if source is not None else None
            name = source_name(giver, binding.slot) if giver else ""
            text = frame.tensors.label(binding.slot, source=name, target=binding.name)
            frame.connect(entry if source is None else steps[source], leave, [text], _stroke(giver))

    def _loop(self, frame: _Frame, loop: LoopPlan, entry: Item, leave: Item) -> None:
        carried = [f"{slot_name(frame.node, o)} becomes {slot_name(frame.node, i)}" for o, i in loop.carry]
        frame.connect(leave, entry, [f"again while {condition_text(loop.again)}", *carried], is_back=True)

    def _branches(self, frame: _Frame, entry: Item, steps: list[Item | Group], leave: Item) -> None:
        node = frame.node
        total = sum(step.weight for step in node.steps)
        for step, box in zip(node.steps, steps, strict=True):
            test = share(step.weight, total) if node.kind is NodeKind.SPLITTER else _test_text(step)
            frame.connect(entry, box, [test, *_given(frame, step)])
            frame.connect(box, leave, frame.tensors.offered(step), _stroke(step))

    def _ensemble(
        self, frame: _Frame, entry: Item, steps: list[Item | Group], customs: Mapping[int, Item], leave: Item
    ) -> None:
        node = frame.node
        is_weighted = any(combine.is_weighted for combine in node.combines)
        for index, (step, box) in enumerate(zip(node.steps, steps, strict=True)):
            weight = [f"weight {step.weight:g}"] if is_weighted else []
            frame.connect(entry, box, [*_when_texts(step), *weight, *_given(frame, step)])
            for combine in node.combines:
                target = customs.get(combine.output, leave)
                for slot in (slot for source, slot in combine.sources if source == index):
                    text = frame.tensors.label(slot, source=source_name(step, slot))
                    frame.connect(box, target, [text], _stroke(step))
        for combine in node.combines:
            if combine.custom is not None:
                custom = customs[combine.output]
                made = (combine.stack, combine.mask)
                given = [frame.tensors.read(r) for r in reads(combine.custom, node.kind) if r.slot not in made]
                if given:
                    frame.connect(entry, custom, given)
                frame.connect(custom, leave, frame.tensors.offered(combine.custom))

    def _customs(self, node: NodePlan) -> dict[int, Item]:
        """A box for each model that combines, by the slot of its output."""
        boxes: dict[int, Item] = {}
        for combine in node.combines:
            if combine.custom is not None:
                box = self._plain(combine.custom, _Frame(node, Tensors(node, is_batched=self._is_batched)))
                if isinstance(box, Item):
                    boxes[combine.output] = box
        return boxes

    def _cascade(self, frame: _Frame, entry: Item, steps: list[Item | Group], leave: Item) -> None:
        before: Item | Group = entry
        onward: list[str] = []
        for number, (step, box) in enumerate(zip(frame.node.steps, steps, strict=True), start=1):
            is_last = number == len(steps)
            frame.connect(before, box, [*onward, *_when_texts(step), *_given(frame, step)])
            accept = f"accept {condition_text(step.accept)}" if step.accept is not None and not is_last else ""
            frame.connect(box, leave, [accept, *frame.tensors.offered(step)], _stroke(step))
            before, onward = box, ["not accepted, or failed" if step.is_soft else "not accepted"]

    def _id(self) -> str:
        self._num_ids += 1
        return f"n{self._num_ids}"


def _given(frame: _Frame, step: StepPlan) -> list[str]:
    return [frame.tensors.read(read) for read in reads(step, frame.node.kind)]


def _stroke(step: StepPlan | None) -> Stroke:
    if step is not None and step.shadow is not None:
        return Stroke.DOTTED
    return Stroke.DASHED if step is not None and step.is_soft else Stroke.SOLID


def _dotted(step: StepPlan) -> Stroke:
    return Stroke.DOTTED if step.shadow is not None else Stroke.SOLID


def _test_text(step: StepPlan) -> str:
    if step.is_otherwise:
        return "otherwise"
    if step.when is not None:
        return f"when {condition_text(step.when)}"
    return f"case {cases_text(step.cases)}"


def _when_texts(step: StepPlan) -> list[str]:
    return [f"when {condition_text(step.when)}"] if step.when is not None else []
