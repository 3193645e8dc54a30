"""A ``Pipeline`` as a draft: its steps in a sequence, wired tensor by tensor."""

from weft.router.operators import SEQUENCE
from weft.tools.convert.draft import Draft, DraftNode, DraftStep, DraftTensor, check, differs
from weft.tools.convert.seldon_v2.answer import FirstAnswer
from weft.tools.convert.seldon_v2.cycle import Feedback, carried
from weft.tools.convert.seldon_v2.flow import Topic
from weft.tools.convert.seldon_v2.names import reference
from weft.tools.convert.seldon_v2.presence import REQUEST, Origin, Presence, groups
from weft.tools.convert.seldon_v2.steps import PipelineSteps
from weft.tools.convert.shared import listed, merged
from weft.tools.convert.writer import quoted

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
