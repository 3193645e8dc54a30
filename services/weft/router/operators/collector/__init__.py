"""The collector: puts the stream of its step together, so that what follows sees sentences or the whole, not tokens."""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from weft.base.errors import UnknownError, WeftError
from weft.base.text.pbtxt import suggestion
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import ResponseCount, Scope
from weft.language.description import counted, given, offered, shadow_flows, slot_name
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, Frame, NodePlan, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.syntax.parse import given_fields
from weft.language.types.signatures import TensorType
from weft.router.operators.alternatives import AlternativesKind, only_branch
from weft.router.operators.collector.pieces import DEFAULT_MAX_BYTES, NOTHING, CollectorSettings, Pieces
from weft.router.steps.node import Node, NodeParts, OperatorPlan, StreamingNode
from weft.router.steps.responses import close_streams, responses_of
from weft.router.steps.run import ResponsePart, Run
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class CollectorPlan(OperatorPlan):
    """A collector."""

    kind: ClassVar[str] = "collector"
    path_form: ClassVar[PathForm] = PathForm.of("+(", ")", only_branch)

    settings: CollectorSettings = NOTHING

    @property
    @override
    def streams(self) -> bool:
        """Sentences are several also of a step that gives one response."""
        has_several = self.settings.text >= 0 or any(step.streams for step in self.steps)
        return has_several and not self.settings.is_whole

    @override
    def node(self, parts: NodeParts) -> Node:
        return (CollectorNode if self.streams else WholeNode)(self, parts)

    @override
    def describe(self) -> Description:
        settings = self.settings
        if settings.text >= 0:
            title = f"each sentence of {slot_name(self, settings.text)}"
        else:
            title = f"{counted(settings.count, 'response')} at a time" if settings.count else "the whole stream"
        joined = ", ".join(slot_name(self, slot) for slot, _ in settings.joins)
        notes = (f"joins {joined}", f"up to {settings.max_bytes} bytes")
        flows = [Flow(None, i, tensors=given(step)) for i, step in enumerate(self.steps)]
        flows += [Flow(i, None, tensors=offered(step), gives=True) for i, step in enumerate(self.steps)]
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("inputs", is_plain=True),
            exit=End(title, notes),
            flows=(*flows, *shadow_flows(self)),
        )


class CollectorNode(StreamingNode):
    """Runs its step once and gives the pieces of its stream, in order; the step is read on when a piece was taken."""

    is_sampled = True

    def __init__(self, plan: CollectorPlan, parts: NodeParts) -> None:
        super().__init__(plan)
        (self._step,) = parts.steps
        self._settings = plan.settings
        self._error_context = parts.error_context

    @override
    async def responses(self, run: Run) -> AsyncGenerator[Run, None]:
        own, pieces = run.with_frame(run.frame.copy()).with_own_stream(), Pieces(self._settings)
        own.request.is_collected = False
        part, latest = _PieceCount(pieces), own
        try:
            await self._step.run(own)
            async with contextlib.aclosing(responses_of(own)) as responses:
                async for response in responses:
                    latest = response
                    for frame in self._add(pieces, response.frame):
                        yield part.run_of(response, frame)
            if (rest := pieces.rest()) is not None:
                yield part.run_of(latest, rest)
        finally:
            await close_streams((own,))

    def _add(self, pieces: Pieces, frame: Frame) -> Iterator[Frame]:
        try:
            yield from pieces.add(frame)
        except WeftError as error:
            raise self._error_context.wrap(error, self.plan.path) from error


class WholeNode(CollectorNode):
    """Gives one response, the whole of its step's stream."""

    @override
    async def run(self, run: Run) -> None:
        latest: Run | None = None
        async with contextlib.aclosing(self.responses(run)) as responses:
            async for response in responses:
                latest = response
        if latest is None:
            error = UnknownError(f"step '{self._step.plan.name}' gave no response")
            raise self._error_context.wrap(error, self.plan.path)
        for _, slot in self.plan.outputs:
            run.frame[slot] = latest.frame[slot]
        run.request.merge(latest.request)


class _PieceCount(ResponsePart):
    """Part of each piece: tells whether a further one is begun."""

    def __init__(self, pieces: Pieces) -> None:
        self.num_responses = 0
        self._pieces = pieces

    def run_of(self, response: Run, frame: Frame) -> Run:
        """The run of the next piece, which ends with ``response``."""
        self.num_responses += 1
        request = replace(response.request, parts=((self, self.num_responses), *response.request.parts))
        return Run(frame, request, response.deadline_ns, response.context, response.record)

    @property
    @override
    def has_ended(self) -> bool:
        return not self._pieces.is_pending

    @override
    async def settle(self, timeout_s: float) -> None:
        pass


_OF_THE_CALLER = ("dependency", "default", "when")


class CollectorKind(AlternativesKind):
    """The collector in graph files: fields, checks, compilation. Its step gives its outputs, as an only alternative."""

    plan = CollectorPlan

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        if len(node.steps) > 1:
            text = (
                f"collector '{node.name}' has {len(node.steps)} steps, and runs one; put them into a node, for example "
                'a sequence, and let its step run that: step { node: "..." }'
            )
            report.error("G027", file, node.steps[1].path, text)
        message, path = node.message.collector, node.kind_path
        is_counted = message.by == pb.Collector.RESPONSES
        if is_counted and message.count < 2:
            text = f"RESPONSES with 'count: {message.count}' collects nothing; give 2 or more"
            report.error("G025", file, f"{path}.count" if message.count else path, text)
        report.refuse(file, path, [("count", bool(message.count) and not is_counted)], "without 'by: RESPONSES'")
        for i, name in enumerate(message.join):
            if name in message.join[:i]:
                report.error("G029", file, f"{path}.join[{i}]", f"'{name}' is joined already; leave one out")

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        for step in node.steps:
            given = given_fields(step.message, _OF_THE_CALLER)
            why = (
                "on the step of a collector, half of whose stream is no answer; give it to the step that runs the node"
            )
            report.refuse(file, step.path, given, why)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        return ""

    @override
    def build_step(
        self, builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int]
    ) -> tuple[StepPlan | None, Mapping[str, TensorType], Iterable[str]]:
        """Compile the step; the text whose sentences count has a slot, also if nobody reads it."""
        message, names = scope.node.message.collector, scope.names.steps[index]
        hidden = [*(message.join or names.outputs.values())] if message.by == pb.Collector.SENTENCE else []
        own = {name: scope.new_slot(name) for name in hidden if name not in slots and name in names.outputs.values()}
        built = builder.step(scope, index, {**slots, **own})
        types = dict(built.outputs)
        joins = self._joins(builder, scope, types)
        types |= {name: _joined_type(builder, scope, name, types[name]) for name in joins}
        text = next((name for name in joins if types[name].datatype == "BYTES"), "")
        if message.by == pb.Collector.SENTENCE and not text and joins and all(types[name].is_known for name in joins):
            why = f"'{joins[0]}' is {types[joins[0]]}; let it join an output of strings"
            builder.report.error(
                "G029", scope.file, f"{scope.node.kind_path}.join[0]", f"only text has sentences: {why}"
            )
        for name, slot in own.items():
            scope.note(slot, name, types[name])
        unread = {slot for name, slot in own.items() if name != text}
        plan = built.plan
        if plan is not None and unread:
            plan = replace(plan, outputs=tuple(binding for binding in plan.outputs if binding.slot not in unread))
        return plan, types, slots

    def _joins(self, builder: NodeBuilder, scope: Scope, types: Mapping[str, TensorType]) -> list[str]:
        """Names of the outputs that are joined; reports those that the step does not give, or that are not clear."""
        given, path, is_open = scope.node.message.collector.join, scope.node.kind_path, scope.names.steps[0].is_open
        for i, name in enumerate(given):
            if name not in types and not is_open:
                text = f"the step of collector '{scope.node.name}' gives no '{name}'{suggestion(name, types)}"
                builder.report.error("G029", scope.file, f"{path}.join[{i}]", text)
        if given:
            return [name for name in dict.fromkeys(given) if name in types]
        texts = [name for name, known in types.items() if known.datatype == "BYTES"]
        if len(texts) != 1 and not is_open and all(known.is_known for known in types.values()):
            has = f"several outputs of strings, {', '.join(texts)}" if texts else "no output of strings"
            text = f"the step of collector '{scope.node.name}' has {has}; name what is joined, for example "
            builder.report.error("G029", scope.file, path, f'{text}join: "{next(iter([*texts, *types]), "...")}"')
        return texts[:1]

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        plan, types = super().build(builder, scope, declared)
        message, is_open = scope.node.message.collector, any(step.is_open for step in scope.names.steps)
        by_sentence = message.by == pb.Collector.SENTENCE
        if not (scope.streaming or by_sentence or is_open):
            text = f"collector '{scope.node.name}' has no effect: its step gives one response; leave it out"
            builder.report.error("G018", scope.file, scope.node.kind_path, text)
        if message.by == pb.Collector.WHOLE:
            scope.streaming.clear()
        elif scope.streaming or by_sentence:
            scope.streaming[0] = ResponseCount.MANY
        if not isinstance(plan, CollectorPlan) or len(plan.steps) != 1:
            return None, types
        return replace(plan, settings=_settings(scope, plan)), types


def _joined_type(builder: NodeBuilder, scope: Scope, name: str, known: TensorType) -> TensorType:
    """Type of a joined output: numbers have any size where they are joined."""
    if not known.is_known or known.datatype == "BYTES":
        return known
    if known.dims[:1] != (-1,):
        text = f"'{name}' is {known}, from {known.origin}: numbers are joined along a first dimension of -1"
        joined = list(scope.node.message.collector.join)
        path = f"{scope.node.kind_path}.join[{joined.index(name)}]"
        builder.report.error("G029", scope.file, path, f"{text}; leave it out, and the last value counts")
    return known


def _settings(scope: Scope, plan: NodePlan) -> CollectorSettings:
    message = scope.node.message.collector
    specs = {spec.name: (slot, spec) for _, slot in plan.steps[0].outputs if (spec := plan.specs.get(slot))}
    joins = [name for name in message.join if name in specs] or [
        name for name, (_, spec) in specs.items() if spec.datatype == "BYTES" and not message.join
    ]
    text = next((specs[name][0] for name in joins if specs[name][1].datatype == "BYTES"), -1)
    return CollectorSettings(
        joins=tuple((specs[name][0], len(specs[name][1].dims)) for name in joins),
        kept=tuple(slot for name, (slot, _) in specs.items() if name not in joins),
        text=text if message.by == pb.Collector.SENTENCE else -1,
        count=message.count,
        max_bytes=message.max_bytes or DEFAULT_MAX_BYTES,
    )
