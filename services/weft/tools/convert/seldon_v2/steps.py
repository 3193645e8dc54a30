"""Steps of a graph for steps of a pipeline: maps of tensors, conditions, guards."""

from weft.router.operators import SWITCH
from weft.tools.convert.draft import DraftNode, DraftStep, check, differs, legal_name
from weft.tools.convert.seldon_v2.flow import Join, Topic
from weft.tools.convert.seldon_v2.names import PipelineNames
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Presence, groups
from weft.tools.convert.shared import fits, listed

_BATCH = (
    "Seldon keeps the requests of '{step}' until there are as many rows as its batch says; here each request has its "
    "own answer. The model's own config.pbtxt batches requests: dynamic_batching"
)
_LATE = "'{name}' goes on when joinWindowMs is over, without what is late; here it waits for all of it"
_WINDOW = "Seldon ends the join of '{name}' when joinWindowMs is over; here the request's deadline ends it"
_SAME = "'{step}' gets '{name}' from {sources}; here it is the first of them that is there"
_EITHER = "Seldon takes the source that is there first; here it is the first one in the file that is there"
_DUPLICATES = (
    "by its documents Seldon wants all triggers of '{step}', which have one source, {topic}; it runs the step when any "
    "of them is there. Here all are wanted"
)


class PipelineSteps(PipelineNames):
    """Calls with what they read and when."""

    def _step(self, presence: Presence, topic: Topic, node: DraftNode, inside: tuple[Topic, ...] = ()) -> DraftStep:
        """A call, with what it reads and when."""
        sink = topic._replace(side="inputs")
        join = self._joins.get(sink) if topic.step else None
        label = self._labels[topic]
        if join is None:
            return DraftStep(label, self._flow.value, graph=topic.pipeline, output_map=self._output_map(topic))
        step = DraftStep(label, join.value, model=topic.step, output_map=self._output_map(topic))
        if topic.step in self._models:
            step.remarks.append(self._models[topic.step])
        self._say_what_is_lost(step, join, topic in self._answering)
        step.when = "" if topic in inside else presence.when(sink, self._spoken)
        step.after = [self._labels[topic] for topic in self._guards(presence, sink)]
        alternatives = self._alternatives(presence, sink, join)
        if alternatives:
            return self._switch(presence, step, sink, alternatives)
        for name in presence.wanted(sink):
            self._map_input(presence, step, sink, name)
        self._map_rest(presence, step, sink)
        return step

    def _guards(self, presence: Presence, sink: Topic) -> list[Topic]:
        """Steps that always answer and that a message waits for without having anything of them."""
        found: dict[Topic, None] = {}
        read: set[Topic] = set()
        pending = [sink]
        while pending:
            join = self._joins.get(pending.pop())
            if join is None:
                continue
            for reference in join.triggers:
                if reference.topic in self._joins:
                    found.update(dict.fromkeys(self._bases(reference.topic)))
                elif presence.is_certain(reference.topic, reference.tensor):
                    found.setdefault(reference.topic)
            read |= {reference.topic for reference in join.sources}
            pending += [reference.topic for reference in join.sources if reference.topic in self._joins]
        return [t for t in found if t in self._labels and t not in read and presence.is_certain(t)]

    def _map_input(
        self, presence: Presence, step: DraftStep, sink: Topic, name: str, only: Found | None = None
    ) -> None:
        found = [only] if only is not None else presence.find(sink, name)
        if not found:
            return
        if len(found) > 1:
            sources = listed(str(one.tensor.topic if one.tensor.topic != REQUEST else one.group) for one in found)
            check(self._source, step.value, step.remarks, _SAME.format(step=step.name, name=name, sources=sources))
        tensor = found[0].tensor
        if self._named(tensor) != name:
            step.input_map[name] = self._named(tensor)
        if tensor.topic == REQUEST:
            self._type_input(tensor.name, sink, name)

    def _type_input(self, name: str, sink: Topic, wanted: str) -> None:
        interface = self._interface(sink)
        if interface is not None and wanted in interface.inputs:
            self._inputs.setdefault(name, interface.inputs[wanted])

    def _map_rest(self, presence: Presence, step: DraftStep, sink: Topic) -> None:
        """Map what nothing that reaches the step is called; one tensor and one input that are left belong together."""
        interface = self._interface(sink)
        if interface is None:
            return
        wanted = presence.wanted(sink)
        missing = [name for name, is_required in wanted.items() if is_required and not presence.find(sink, name)]
        if not missing:
            return
        used = {one.tensor for name in wanted for one in presence.find(sink, name)}
        arriving = [found for name in presence.names(sink) for found in presence.find(sink, name)[:1]]
        left = [one.tensor for one in arriving if one.tensor not in used]
        if len(missing) == len(left) == 1:
            giving = self._interface(left[0].topic) if left[0].topic != REQUEST else None
            produced = giving.outputs.get(left[0].name) if giving is not None else None
            if produced is None or fits(produced, interface.inputs[missing[0]]):
                step.input_map[missing[0]] = self._named(left[0])
                if left[0].topic == REQUEST:
                    self._type_input(left[0].name, sink, missing[0])
                return
        given = listed(self._named(tensor) for tensor in left)
        text = f"nothing that reaches the step is called {listed(missing)}; map it from one of: {given}"
        check(self._source, step.value, step.remarks, text)

    def _alternatives(self, presence: Presence, sink: Topic, join: Join) -> list[dict[str, Found]]:
        """Sets of sources of which the first that is there feeds the step; none where there is no choice."""
        several = {name: found for name in presence.wanted(sink) if len(found := presence.find(sink, name)) > 1}
        if not several:
            return []
        if len(several) == 1:
            ((name, found),) = several.items()
            is_choice = join.kind != "inner" or len({one.group for one in found}) == 1
            return [{name: one} for one in found] if is_choice else []
        sets = [
            {name: one for name, found in several.items() for one in found if one.group == group}
            for group in groups(join.sources)
        ]
        return [one for one in sets if len(one) == len(several)] if join.kind != "inner" else []

    def _switch(
        self, presence: Presence, step: DraftStep, sink: Topic, alternatives: list[dict[str, Found]]
    ) -> DraftStep:
        """The step once for each source that may feed it."""
        node = self._node(step.name, SWITCH)
        check(self._source, step.value, node.remarks, _EITHER)
        for chosen in alternatives:
            source = next(iter(chosen.values())).tensor.topic
            name = f"{step.name}_{source.step or self._flow.name}"
            one = DraftStep("", step.value, model=step.model)
            one.name = legal_name(self._source, step.value, name, [other.name for other in node.steps], [])
            for wanted in presence.wanted(sink):
                self._map_input(presence, one, sink, wanted, chosen.get(wanted))
            one.when = presence.when_found(sink, chosen.values(), self._spoken)
            if one.when in [other.when for other in node.steps]:
                continue
            node.steps.append(one)
            if not one.when:
                one.is_otherwise = True
                break
        outer = DraftStep(step.name, step.value, node=node.name, when=step.when, after=step.after)
        outer.output_map, outer.remarks = step.output_map, step.remarks
        return outer

    def _say_what_is_lost(self, step: DraftStep, join: Join, is_live: bool) -> None:
        source = self._source
        if join.batch is not None:
            text = _BATCH.format(step=step.name)
            (differs if is_live else check)(source, join.batch, step.remarks, text)
        self._say_window(step.name, join, step.remarks)
        if join.triggers_kind == "inner":
            for topic, tensors in groups(join.triggers).items():
                if len(tensors) > 1:
                    check(source, join.value, step.remarks, _DUPLICATES.format(step=step.name, topic=topic))

    def _say_window(self, name: str, join: Join, remarks: list[str]) -> None:
        if join.kind == "outer" and len(groups(join.sources)) > 1:
            differs(self._source, join.window or join.value, remarks, _LATE.format(name=name))
        elif join.window is not None:
            remarks.append(_WINDOW.format(name=name))

    def _node(self, name: str, kind: object) -> DraftNode:
        legal = legal_name(self._source, self._flow.value, name, self._draft.nodes, [])
        node = self._draft.nodes[legal] = DraftNode(legal, kind, self._flow.value)  # type: ignore[arg-type]
        return node
