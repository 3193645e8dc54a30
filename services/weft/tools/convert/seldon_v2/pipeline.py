"""Converts a ``Pipeline`` to a draft: its steps in a sequence, wired tensor by tensor."""

from dataclasses import replace

from weft.language.compiler.nodes import NodeKind
from weft.language.types.signatures import TensorType
from weft.router.operators import ENSEMBLE, SEQUENCE, SWITCH
from weft.tools.convert.draft import (
    CHECK,
    Draft,
    DraftCombine,
    DraftNode,
    DraftStep,
    check,
    differs,
    legal_name,
)
from weft.tools.convert.seldon_v2.flow import Feedback, Join, Topic, groups
from weft.tools.convert.seldon_v2.parts import PipelineParts
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Origin, Presence
from weft.tools.convert.signatures import fits, listed, merged
from weft.tools.convert.wiring import cel_name, unused
from weft_protos import graph_pb2 as pb

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


class PipelineConversion(PipelineParts):
    """The conversion of one pipeline."""

    def run(self) -> Draft | None:
        """Make the draft; None after a reported error."""
        self._collect()
        order = self._ordered()
        if order is None or self._source.has_errors:
            return None
        self._presence = Presence(self._joins, self._interface, order, self._flow.outputs, self._spoken)
        self._emit(self._calls(order))
        return None if self._source.has_errors else self._draft

    def _emit(self, calls: list[Topic]) -> None:
        draft, flow, feedback = self._draft, self._flow, self._feedback
        self._answering = live = self._live(flow.outputs)
        if feedback is not None:
            live |= self._live(feedback.source)
        root = draft.nodes["root"] = DraftNode("root", SEQUENCE, flow.value)
        if not flow.has_output:
            check(self._source, flow.value, draft.remarks, _NO_OUTPUT)
        branches = self._branches([topic for topic in calls if topic in live]) if feedback is None else {}
        inside = {topic for branch in branches.values() for topic in branch}
        self._name_tensors(calls, branches)
        self._ask_about_outputs()
        steps = {topic: self._step(topic) for topic in calls if topic in live - inside}
        root.steps = [step for topic, step in steps.items() if topic not in self._in_place]
        root.steps += self._copies([topic for topic in calls if topic not in live])
        root.steps += [steps[topic] for topic in self._in_place if topic in steps]
        if branches:
            root.steps.append(self._first_step(branches))
        if feedback is not None:
            self._set_loop(root, feedback)
        if len(root.steps) == 1 and root.steps[0].node and not root.steps[0].when:
            only = draft.nodes.pop(root.steps[0].node)
            only.name, only.remarks = "root", [*only.remarks, *root.steps[0].remarks]
            draft.nodes = {"root": only, **{name: node for name, node in draft.nodes.items() if name != "root"}}
        self._declare(branches)

    def _step(self, topic: Topic, inside: tuple[Topic, ...] = ()) -> DraftStep:
        presence, sink = self._presence, topic.sink
        join = self._joins.get(sink) if topic.step else None
        label = self._labels[topic]
        if join is None:
            return DraftStep(label, self._flow.value, graph=topic.pipeline, output_map=self._output_map(topic))
        step = DraftStep(label, join.value, model=topic.step, output_map=self._output_map(topic))
        if topic.step in self._models:
            step.remarks.append(self._models[topic.step])
        if join.batch is not None:
            say = differs if topic in self._answering else check
            say(self._source, join.batch, step.remarks, _BATCH.format(step=step.name))
        self._say_window(step.name, join, step.remarks)
        if join.triggers_kind == "inner":
            for trigger, tensors in groups(join.triggers).items():
                if len(tensors) > 1:
                    text = _DUPLICATES.format(step=step.name, topic=trigger)
                    check(self._source, join.value, step.remarks, text)
        step.when = "" if topic in inside else presence.when(sink)
        step.after = [self._labels[topic] for topic in self._guards(sink)]
        alternatives = self._alternatives(sink, join)
        if alternatives:
            return self._switch(step, sink, alternatives)
        for name in presence.wanted(sink):
            self._map_input(step, sink, name)
        self._map_rest(step, sink)
        return step

    def _guards(self, sink: Topic) -> list[Topic]:
        """Steps that always answer and that a message waits for without using their outputs."""
        presence = self._presence
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

    def _map_input(self, step: DraftStep, sink: Topic, name: str, only: Found | None = None) -> None:
        found = [only] if only is not None else self._presence.find(sink, name)
        if not found:
            return
        if len(found) > 1:
            sources = listed(str(one.tensor.topic if one.tensor.topic != REQUEST else one.group) for one in found)
            check(self._source, step.value, step.remarks, _SAME.format(step=step.name, name=name, sources=sources))
        self._bind(step, sink, name, found[0].tensor)

    def _bind(self, step: DraftStep, sink: Topic, name: str, tensor: Origin) -> None:
        """Bind an input of a step to a tensor; one of the request gets its type."""
        if self._named(tensor) != name:
            step.input_map[name] = self._named(tensor)
        interface = self._interface(sink)
        if tensor.topic == REQUEST and interface is not None and name in interface.inputs:
            self._inputs.setdefault(tensor.name, interface.inputs[name])

    def _map_rest(self, step: DraftStep, sink: Topic) -> None:
        """Map inputs without a tensor of their name; a single remaining tensor and input belong together."""
        presence, interface = self._presence, self._interface(sink)
        wanted = presence.wanted(sink)
        missing = [name for name, is_required in wanted.items() if is_required and not presence.find(sink, name)]
        if interface is None or not missing:
            return
        used = {one.tensor for name in wanted for one in presence.find(sink, name)}
        arriving = [found for name in presence.names(sink) for found in presence.find(sink, name)[:1]]
        left = [one.tensor for one in arriving if one.tensor not in used]
        if len(missing) == len(left) == 1:
            produced = self._outputs(left[0].topic).get(left[0].name)
            if produced is None or fits(produced, interface.inputs[missing[0]]):
                step.input_map[missing[0]] = self._named(left[0])
                self._bind(step, sink, missing[0], left[0])
                return
        given = listed(self._named(tensor) for tensor in left)
        text = f"nothing that reaches the step is called {listed(missing)}; map it from one of: {given}"
        check(self._source, step.value, step.remarks, text)

    def _alternatives(self, sink: Topic, join: Join) -> list[dict[str, Found]]:
        """Sets of sources of which the first present one feeds the step; empty without a choice."""
        presence = self._presence
        several = {name: found for name in presence.wanted(sink) if len(found := presence.find(sink, name)) > 1}
        if len(several) == 1:
            ((name, found),) = several.items()
            is_choice = join.kind != "inner" or len({one.group for one in found}) == 1
            return [{name: one} for one in found] if is_choice else []
        sets = [
            {name: one for name, found in several.items() for one in found if one.group == group}
            for group in groups(join.sources)
        ]
        return [one for one in sets if len(one) == len(several)] if several and join.kind != "inner" else []

    def _switch(self, step: DraftStep, sink: Topic, alternatives: list[dict[str, Found]]) -> DraftStep:
        presence, node = self._presence, self._node(step.name, SWITCH)
        check(self._source, step.value, node.remarks, _EITHER)
        for chosen in alternatives:
            source = next(iter(chosen.values())).tensor.topic
            name = f"{step.name}_{source.step or self._flow.name}"
            one = DraftStep("", step.value, model=step.model)
            one.name = legal_name(self._source, step.value, name, [other.name for other in node.steps], [])
            for wanted in presence.wanted(sink):
                self._map_input(one, sink, wanted, chosen.get(wanted))
            one.when = presence.when_found(sink, chosen.values())
            if one.when in [other.when for other in node.steps]:
                continue
            node.steps.append(one)
            if not one.when:
                one.is_otherwise = True
                break
        outer = DraftStep(step.name, step.value, node=node.name, when=step.when, after=step.after)
        outer.output_map, outer.remarks = step.output_map, step.remarks
        return outer

    def _say_window(self, name: str, join: Join, remarks: list[str]) -> None:
        if join.kind == "outer" and len(groups(join.sources)) > 1:
            differs(self._source, join.window or join.value, remarks, _LATE.format(name=name))
        elif join.window is not None:
            remarks.append(_WINDOW.format(name=name))

    def _node(self, name: str, kind: NodeKind) -> DraftNode:
        legal = legal_name(self._source, self._flow.value, name, self._draft.nodes, [])
        node = self._draft.nodes[legal] = DraftNode(legal, kind, self._flow.value)
        return node

    def _set_loop(self, root: DraftNode, feedback: Feedback) -> None:
        """Loop while a tensor is fed back and there is no answer."""
        presence, flow, answer = self._presence, self._flow, self._flow.outputs
        back = self._coming_back(feedback)
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
        answers = [found for name in presence.names(answer) for found in presence.find(answer, name)]
        tests = [f"has({cel_name('outputs', name)})" for name in pairs]
        tests += [f"!has({cel_name('outputs', self._named(one.tensor))})" for one in answers[:1]]
        root.loop = pb.Loop(max_iterations=flow.max_revisits + 1, carry=pairs)
        setattr(root.loop, "while", " && ".join(tests))  # a word of Python
        root.remarks.append(_ROUNDS.format(number=flow.max_revisits))

    def _coming_back(self, feedback: Feedback) -> dict[Origin, str]:
        entry, join, source = feedback
        tensors = groups(join.sources)[source] or self._outputs(source)
        given = {name: join.renamed.get((source, name), name) for name in tensors}
        is_unknown = self._interface(entry) is None
        wanted = given.values() if is_unknown else self._presence.wanted(entry)
        back = {Origin(source, name): new for name, new in given.items() if new in wanted}
        if not back and len(given) == 1 and len(wanted) == 1:
            back = {Origin(source, name): new for name in given for new in wanted}
        return back

    def _ask_about_outputs(self) -> None:
        """Ask of outputs on which the file lets depend what is called, and which by their signatures always come."""
        always: dict[str, list[str]] = {}
        for tensor in sorted(self._presence.decisive() - self._presence.optional):
            if self._interface(tensor.topic) is not None:
                always.setdefault(self._labels[tensor.topic], []).append(tensor.name)
        for step, names in always.items():
            text = _ALWAYS.format(step=step, names=listed(names))
            check(self._source, self._flow.value, self._draft.remarks, text)

    def _branches(self, calls: list[Topic]) -> dict[Topic, list[Topic]]:
        """Where the pipeline answers with the first of several steps: by each, the steps called for it alone, in order.

        They become branches of an ensemble with FIRST. Where the one step that answers may not run there is no answer,
        which is an error of an ensemble, too. ``calls`` are the answers of steps that the answer is made of, in order.
        """
        presence, answer, readers = self._presence, self._flow.outputs, self._readers()
        join = self._joins[answer]
        ends = list(groups(join.sources))
        is_choice = len(ends) > 1 and join.kind != "inner"
        if not (is_choice or (len(ends) == 1 and not presence.is_certain(answer))):
            return {}
        if any(end.side != "outputs" or readers[end] != {answer} for end in ends) or not self._is_alike(ends):
            return {}
        return {end: self._branch(end, calls, readers) for end in ends}

    def _is_alike(self, ends: list[Topic]) -> bool:
        """Whether each step gives all tensors of the answer whenever it runs."""
        presence, answer = self._presence, self._flow.outputs
        names = presence.names(answer)
        if not names:
            return all(self._interface(end) is None for end in ends)
        found = [[one.tensor for one in presence.find(answer, name)] for name in names]
        return all(
            {one.topic for one in some} == set(ends) and not any(one in presence.optional for one in some)
            for some in found
        )

    def _branch(self, end: Topic, calls: list[Topic], readers: dict[Topic, set[Topic]]) -> list[Topic]:
        """The step and those before it that nothing else reads and that leave nothing out."""
        inside = {end}
        leaving = {tensor.topic for tensor in self._presence.optional}
        for topic in reversed(calls):
            read_by = readers.get(topic, set())
            if topic.step and read_by and read_by <= inside and topic not in leaving:
                inside |= {topic} if all(self._needs(reader, topic) for reader in read_by) else set()
        return [topic for topic in calls if topic in inside]

    def _needs(self, reader: Topic, topic: Topic) -> bool:
        join = self._joins.get(reader._replace(side="inputs"))
        sources = groups(join.sources) if join is not None else {}
        return join is not None and topic in sources and (join.kind == "inner" or len(sources) == 1)

    def _first_step(self, branches: dict[Topic, list[Topic]]) -> DraftStep:
        presence, node = self._presence, self._node("answer", ENSEMBLE)
        node.combines = [DraftCombine(name, "FIRST") for name in presence.names(self._flow.outputs)]
        if not node.combines:
            remark = CHECK + "write the name of the tensor that all give"
            node.combines = [DraftCombine("OUTPUT", "FIRST", remarks=[remark])]
        waits: dict[str, None] = {}
        for end, inside in branches.items():
            when = presence.when(end.sink, inside)
            step = self._as_one([self._step(topic, tuple(inside)) for topic in inside], end)
            waits |= dict.fromkeys(step.after)
            step.when, step.after = when, []
            node.steps.append(step)
        label = unused("answer", set(self._labels.values()))
        return DraftStep(label, self._flow.value, node=node.name, after=list(waits))

    def _as_one(self, steps: list[DraftStep], last: Topic) -> DraftStep:
        """Combine the steps into one, in a node if there are several; it runs after guards outside of them."""
        if len(steps) == 1:
            return steps[0]
        node = self._node(self._labels[last], SEQUENCE)
        node.steps = steps
        guards = _outer_guards(steps, steps)
        return DraftStep(self._labels[last], self._joins[last.sink].value, node=node.name, after=guards)

    def _copies(self, calls: list[Topic]) -> list[DraftStep]:
        parts: list[list[Topic]] = []
        for topic in calls:
            read = {t for t in self._live(topic) if t.side == "outputs"}
            touching = [part for part in parts if read & set(part)]
            parts = [part for part in parts if part not in touching]
            parts.append([*(one for part in touching for one in part), topic])
        copies = [self._as_one([self._step(topic) for topic in part], part[-1]) for part in parts]
        for copy in copies:
            copy.shadow_percent = 100.0
            copy.output_map = {}
            copy.remarks.append(_COPY)
        return copies

    def _declare(self, branches: dict[Topic, list[Topic]]) -> None:
        draft, flow, source, presence = self._draft, self._flow, self._source, self._presence
        join = self._joins[flow.outputs]
        self._say_window(flow.name, join, draft.remarks)
        if self._unknown:
            self._signatures.ask(source, draft, self._unknown)
            return
        draft.max_batch_size = min(self._batch_sizes, default=0)
        asked = self._graph_inputs()
        known = {**asked, **self._inputs}
        inputs: dict[str, TensorType] = {}
        for name in dict.fromkeys(found.tensor.name for sink in self._joins for found in self._requested(sink)):
            if name not in known:
                differs(source, flow.value, draft.remarks, _UNTYPED.format(name=name))
            tensor = known.get(name) or TensorType("FP32", (-1,), draft.max_batch_size > 0, False, "")
            inputs[name] = replace(tensor, is_optional=Origin(REQUEST, name) in presence.optional)
        draft.inputs = merged([inputs, asked])
        outputs: dict[str, TensorType] = {}
        draft.outputs = outputs
        for name in presence.names(flow.outputs):
            for origin in (found.tensor for found in presence.find(flow.outputs, name)):
                given = self._outputs(origin.topic).get(origin.name)
                if given is not None:
                    is_sure = origin.topic in branches or presence.is_present(origin)
                    outputs.setdefault(self._names[origin], replace(given, is_optional=not is_sure))
        absent = [name for name, tensor in outputs.items() if tensor.is_optional]
        if absent and join.kind == "inner":
            check(source, join.value, draft.remarks, _ALSO.format(names=listed(absent)))
        sources = list(groups(join.sources))
        if join.kind == "any" and len(sources) > 1 and not branches:
            check(source, join.value, draft.remarks, _FIRST_ONLY.format(steps=listed(map(str, sources))))


def _outer_guards(siblings: list[DraftStep], steps: list[DraftStep]) -> list[str]:
    """Take the guards that are not beside the steps, for the step that calls their node."""
    names = {step.name for step in siblings}
    outer = [name for step in steps for name in step.after if name not in names]
    for step in steps:
        step.after = [name for name in step.after if name in names]
    return list(dict.fromkeys(outer))
