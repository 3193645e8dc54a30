"""A ``Pipeline`` as a draft: its steps in a sequence, wired tensor by tensor."""

from weft.router.operators import SEQUENCE, SWITCH
from weft.tools.convert.draft import Draft, DraftNode, DraftStep, DraftTensor, check, differs, legal_name
from weft.tools.convert.seldon_v2.answer import FirstAnswer
from weft.tools.convert.seldon_v2.cycle import Feedback, carried
from weft.tools.convert.seldon_v2.flow import Join, Topic
from weft.tools.convert.seldon_v2.names import PipelineNames, reference
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Origin, Presence, groups
from weft.tools.convert.shared import fits, listed, merged
from weft.tools.convert.writer import quoted

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
            for part in join.triggers:
                if part.topic in self._joins:
                    found.update(dict.fromkeys(self._bases(part.topic)))
                elif presence.is_certain(part.topic, part.tensor):
                    found.setdefault(part.topic)
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


_COPY = "the pipeline does not answer with this, so nobody waits for it here, and its failures are not seen"
_ALSO = "Seldon would not answer without {names}; here the answer goes without"
_FIRST_ONLY = "Seldon answers with the one of {steps} that comes first; here the answer has every one that there is"
_UNTYPED = "no model reads '{name}', so its datatype is not known; say which it has"
_ALWAYS = (
    "by its signature each answer of '{step}' has {names}; if what is called depends on that, its configuration has to "
    "say that answers may lack it"
)
_COMES_BACK = (
    "write the names of the tensor that comes back and of the input that takes it in place of OUTPUT and INPUT"
)
_ROUNDS = (
    "a request that comes to a step more than {number} times fails in Seldon; here its answer lacks what is optional"
)
_NO_OUTPUT = "the pipeline has no 'output', so Seldon answers nobody; here it answers with its last steps"


class PipelineConversion(PipelineSteps):
    """One pipeline on its way to a draft."""

    def run(self) -> Draft | None:
        """The draft; None where an error was reported."""
        source, flow, draft = self._source, self._flow, self._draft
        self._collect()
        order = self._ordered()
        if order is None or source.has_errors:
            return None
        presence = Presence(self._joins, self._interface, order, flow.outputs)
        presence.settle()
        self._emit(presence, order)
        return None if source.has_errors else draft

    def _emit(self, presence: Presence, order: list[Topic]) -> None:
        draft, flow = self._draft, self._flow
        calls = self._calls(order)
        self._answering = live = self._live(flow.outputs)
        if self._feedback is not None:
            live |= self._live(self._feedback.source)
        root = DraftNode("root", SEQUENCE, flow.value)
        draft.nodes["root"] = root
        if not flow.has_output:
            check(self._source, flow.value, draft.remarks, _NO_OUTPUT)
        ends = [topic for topic in calls if topic in live and self._feedback is None]
        first = FirstAnswer(presence, flow.outputs, ends, self._readers(), is_choice=self._feedback is None)
        self._name_tensors(presence, calls, first)
        self._ask_about_outputs(presence)
        steps = {
            topic: self._step(presence, topic, root) for topic in calls if topic in live and topic not in first.inside
        }
        root.steps = [step for topic, step in steps.items() if topic not in self._in_place]
        root.steps += self._copies(presence, [topic for topic in calls if topic not in live])
        root.steps += [steps[topic] for topic in self._in_place if topic in steps]
        if first.branches:
            root.steps.append(self._first_step(presence, first))
        if self._feedback is not None:
            self._set_loop(presence, root, self._feedback)
        if len(root.steps) == 1 and root.steps[0].node and not root.steps[0].when:
            only = draft.nodes.pop(root.steps[0].node)
            only.name, only.remarks = "root", [*only.remarks, *root.steps[0].remarks]
            draft.nodes = {"root": only, **{n: node for n, node in draft.nodes.items() if n != "root"}}
        self._declare(presence, first)

    def _set_loop(self, presence: Presence, root: DraftNode, feedback: Feedback) -> None:
        """Go round while something comes back and there is no answer yet."""
        interface, flow = self._interface(feedback.source), self._flow
        back = carried(feedback, presence, interface.outputs if interface is not None else {})
        pairs = {
            self._named(tensor): found[0].tensor.name
            for tensor, name in back.items()
            if (found := presence.find(feedback.entry, name)) and found[0].tensor.topic == REQUEST
        }
        if not pairs and self._unknown:
            pairs = {"OUTPUT": "INPUT"}
            check(self._source, feedback.join.value, root.remarks, _COMES_BACK)
        elif not pairs:
            self._source.error(feedback.join.value, f"which tensor of '{feedback.source}' goes round is not known")
        answers = [found for name in presence.names(flow.outputs) for found in presence.find(flow.outputs, name)]
        tests = [f"has({reference('outputs', name)})" for name in pairs]
        tests += [f"!has({reference('outputs', self._named(one.tensor))})" for one in answers[:1]]
        root.loop = [f"while: {quoted(' && '.join(tests))}", f"max_iterations: {flow.max_revisits + 1}"]
        root.loop += [f"carry {{ key: {quoted(given)} value: {quoted(name)} }}" for given, name in pairs.items()]
        root.remarks.append(_ROUNDS.format(number=flow.max_revisits))

    def _ask_about_outputs(self, presence: Presence) -> None:
        """Ask of outputs on which the file lets depend what is called, and which by their signatures always come."""
        always: dict[str, list[str]] = {}
        for tensor in sorted(presence.decisive() - presence.optional):
            if self._interface(tensor.topic) is not None:
                always.setdefault(self._labels[tensor.topic], []).append(tensor.name)
        for step, names in always.items():
            text = _ALWAYS.format(step=step, names=listed(names))
            check(self._source, self._flow.value, self._draft.remarks, text)

    def _first_step(self, presence: Presence, first: FirstAnswer) -> DraftStep:
        """The branches of which the first to answer answers."""
        node = self._node("answer", first.kind)
        node.combines = first.combines(presence)
        waits: dict[str, None] = {}
        for end, inside in first.branches.items():
            when = presence.when(end._replace(side="inputs"), self._spoken, inside)
            steps = [self._step(presence, topic, node, tuple(inside)) for topic in inside]
            if len(steps) == 1:
                step = steps[0]
            else:
                chain = self._node(self._labels[end], SEQUENCE)
                chain.steps = steps
                step = DraftStep(self._labels[end], self._joins[end._replace(side="inputs")].value, node=chain.name)
            step.when = when
            node.steps.append(step)
            waits |= dict.fromkeys(self._outer_guards(steps if len(steps) > 1 else [], steps))
        label = self._free("answer", set(self._labels.values()))
        return DraftStep(label, self._flow.value, node=node.name, after=list(waits))

    def _outer_guards(self, siblings: list[DraftStep], steps: list[DraftStep]) -> list[str]:
        """Take the guards that are not beside the steps, for the step that calls their node."""
        names = {step.name for step in siblings}
        outer = [name for step in steps for name in step.after if name not in names]
        for step in steps:
            step.after = [name for name in step.after if name in names]
        return list(dict.fromkeys(outer))

    def _copies(self, presence: Presence, calls: list[Topic]) -> list[DraftStep]:
        """Steps that the answer does not need, those that read one another as one."""
        parts: list[list[Topic]] = []
        for topic in calls:
            read = {t for t in self._live(topic) if t.side == "outputs"}
            touching = [part for part in parts if read & set(part)]
            parts = [part for part in parts if part not in touching]
            parts.append([*(one for part in touching for one in part), topic])
        return [self._copy(presence, part) for part in parts]

    def _copy(self, presence: Presence, part: list[Topic]) -> DraftStep:
        first = self._step(presence, part[0], self._draft.nodes["root"])
        if len(part) > 1:
            node = self._node(self._labels[part[-1]], SEQUENCE)
            node.steps = [first, *(self._step(presence, topic, node) for topic in part[1:])]
            guards = self._outer_guards(node.steps, node.steps)
            value = self._joins[part[-1]._replace(side="inputs")].value
            first = DraftStep(self._labels[part[-1]], value, node=node.name, after=guards)
        first.shadow_percent = 100.0
        first.output_map = {}
        first.remarks.append(_COPY)
        return first

    def _declare(self, presence: Presence, first: FirstAnswer) -> None:
        """Inputs and outputs of the graph."""
        draft, flow, source = self._draft, self._flow, self._source
        join = self._joins[flow.outputs]
        self._say_window(flow.name, join, draft.remarks)
        if self._unknown:
            self._signatures.ask(source, draft, self._unknown)
            return
        asked = self._graph_inputs()
        self._inputs = {**asked, **self._inputs}
        names = [found.tensor.name for sink in self._joins for found in self._requested(presence, sink)]
        for name in dict.fromkeys(names):
            if name not in self._inputs:
                differs(source, flow.value, draft.remarks, _UNTYPED.format(name=name))
        inputs = {
            name: self._inputs.get(name, DraftTensor("FP32", (-1,), min(self._batch_sizes, default=0) > 0))._replace(
                is_optional=Origin(REQUEST, name) in presence.optional
            )
            for name in dict.fromkeys(names)
        }
        draft.inputs = merged([inputs, asked])
        outputs: dict[str, DraftTensor] = {}
        for name in presence.names(flow.outputs):
            for found in presence.find(flow.outputs, name):
                interface = self._interface(found.tensor.topic) if found.tensor.topic != REQUEST else None
                if interface is None or found.tensor.name not in interface.outputs:
                    continue
                is_sure = found.tensor.topic in first.branches or presence.is_present(found.tensor)
                tensor = interface.outputs[found.tensor.name]._replace(is_optional=not is_sure)
                outputs.setdefault(self._names[found.tensor], tensor)
        draft.outputs = outputs
        draft.max_batch_size = min(self._batch_sizes, default=0)
        absent = [name for name, tensor in outputs.items() if tensor.is_optional]
        if absent and join.kind == "inner":
            check(source, join.value, draft.remarks, _ALSO.format(names=listed(absent)))
        sources = list(groups(join.sources))
        if join.kind == "any" and len(sources) > 1 and not first.branches:
            check(source, join.value, draft.remarks, _FIRST_ONLY.format(steps=listed(map(str, sources))))
