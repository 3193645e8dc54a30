"""Reads a pipeline file as joins of messages.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v2/operator/apis/mlops/v1alpha1/pipeline_types.go
    https://github.com/SeldonIO/seldon-core/blob/v2/scheduler/pkg/store/pipeline/validate.go
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.resolve import MAX_ENTRIES
from weft.language.pruning import reached
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened

_SPEC_FIELDS = frozenset({"input", "steps", "output", "dataflow", "allowCycles", "maxStepRevisits"})
_STEP_FIELDS = frozenset(
    {"name", "inputs", "joinWindowMs", "tensorMap", "triggers", "inputsJoinType", "triggersJoinType", "batch"}
)
_INPUT_FIELDS = frozenset(
    {"externalInputs", "externalTriggers", "joinWindowMs", "joinType", "triggersJoinType", "tensorMap"}
)
_OUTPUT_FIELDS = frozenset({"steps", "joinWindowMs", "stepsJoin", "tensorMap"})
_BATCH_FIELDS = frozenset({"size", "windowMs", "rolling"})
_JOINS = ("inner", "outer", "any")
_SIDES = ("inputs", "outputs")


class Topic(NamedTuple):
    """An input or output message of a step, or with ``step`` "" of the pipeline."""

    pipeline: str
    step: str
    side: str

    def __str__(self) -> str:
        return f"{self.step or self.pipeline}.{self.side}"

    @property
    def sink(self) -> "Topic":
        """The message whose join it comes from: for a step's output, the step's input."""
        return self._replace(side="inputs") if self.step else self


class MessagePart(NamedTuple):
    """A part of a message that is read: one tensor, or with ``tensor`` "" all."""

    topic: Topic
    tensor: str
    value: YamlValue


@dataclass(slots=True)
class Join:
    """A message joined from several others.

    Attributes:
        sources: Sources of its tensors; "inner" (all), "outer" or "any" of them are required, by ``kind``.
        renamed: Tensors with another name in it.
        triggers: Other messages that must exist.
        window, batch: How long to wait for sources, and for how many rows, if the file says so.
    """

    value: YamlValue
    sources: list[MessagePart] = field(default_factory=list)
    kind: str = "inner"
    renamed: dict[tuple[Topic, str], str] = field(default_factory=dict)
    triggers: list[MessagePart] = field(default_factory=list)
    triggers_kind: str = "inner"
    window: YamlValue | None = None
    batch: YamlValue | None = None

    @property
    def parts(self) -> list[MessagePart]:
        """Everything that it reads, triggers included."""
        return [*self.sources, *self.triggers]


@dataclass(slots=True)
class PipelineFlow:
    """One pipeline.

    Attributes:
        joins: By the resulting message; the inputs of a pipeline that reads no other have none.
        has_output: Whether the file declares an output.
        allows_cycles: Whether steps may be visited again, ``max_revisits`` times.
        left_out: Fields that were not read.
    """

    value: YamlValue
    name: str
    joins: dict[Topic, Join] = field(default_factory=dict)
    has_output: bool = False
    allows_cycles: bool = False
    max_revisits: int = 0
    left_out: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> Topic:
        """The pipeline's input message."""
        return Topic(self.name, "", "inputs")

    @property
    def outputs(self) -> Topic:
        """The pipeline's output message."""
        return Topic(self.name, "", "outputs")

    @property
    def steps(self) -> list[str]:
        """Names of its steps."""
        return [topic.step for topic in self.joins if topic.step]


def read_flow(source: Source, document: YamlValue, name: str) -> PipelineFlow | None:
    """Read one document; errors are reported to ``source``; None if there is nothing to convert."""
    flow = PipelineFlow(document, name)
    spec_value = document.entries.get("spec")
    spec = source.mapping(spec_value, "spec")
    source.unknown(spec, _SPEC_FIELDS, "the spec")
    given = source.sequence(spec.get("steps"), "steps")
    if not 0 < len(given) <= MAX_ENTRIES:
        text = f"has {len(given)} steps; the limit of Weft is {MAX_ENTRIES}" if given else "has no 'steps'"
        source.error(spec_value or document, f"the Pipeline {text}")
        return None
    flow.allows_cycles = source.boolean(spec.get("allowCycles"), "allowCycles")
    flow.max_revisits = int(source.number(spec.get("maxStepRevisits"), "maxStepRevisits") or 0)
    reader = _FlowReader(source, flow)
    for value in given:
        reader.name_step(value)
    for value in given:
        if value.kind == "mapping":
            reader.step(value)
    reader.input(spec.get("input"))
    reader.output(spec.get("output"))
    return flow


class _FlowReader:
    def __init__(self, source: Source, flow: PipelineFlow) -> None:
        self._source = source
        self._flow = flow

    def name_step(self, value: YamlValue) -> None:
        source, flow = self._source, self._flow
        name = source.string(source.mapping(value, "a step").get("name"), "name")
        if not name:
            if value.kind == "mapping":
                source.error(value, "the step has no 'name'")
            return
        topic, fault = Topic(flow.name, name, "inputs"), ""
        if name == flow.name:
            fault = f"step '{shortened(name)}' has the name of its pipeline"
        elif "." in name:
            fault = f"step '{shortened(name)}' has a '.' in its name, which divides references"
        elif topic in flow.joins:
            fault = f"a second step is called '{shortened(name)}'"
        if fault:
            source.error(value.entries["name"], fault)
        flow.joins[topic] = Join(value)

    def step(self, value: YamlValue) -> None:
        source, flow, entries = self._source, self._flow, value.entries
        join = flow.joins.get(Topic(flow.name, entries.get("name", value).text, "inputs"))
        if join is None or join.value is not value:
            return
        source.unknown(entries, _STEP_FIELDS, "the step")
        self._join(join, entries, ("inputs", "inputsJoinType", "triggers"))
        if not join.sources:
            join.sources = [MessagePart(flow.inputs, "", value)]
        join.batch = entries.get("batch")
        source.unknown(source.mapping(join.batch, "batch"), _BATCH_FIELDS, "the batch")
        self._rename(join, entries.get("tensorMap"))

    def input(self, value: YamlValue | None) -> None:
        if value is None:
            return
        source, flow, join = self._source, self._flow, Join(value)
        entries = source.mapping(value, "input")
        source.unknown(entries, _INPUT_FIELDS, "the input")
        self._join(join, entries, ("externalInputs", "joinType", "externalTriggers"), is_external=True)
        if not join.sources:
            source.error(value, "the input of the pipeline has no 'externalInputs'")
        self._rename(join, entries.get("tensorMap"), is_external=True)
        flow.joins[flow.inputs] = join

    def output(self, value: YamlValue | None) -> None:
        source, flow, join = self._source, self._flow, Join(value or self._flow.value)
        entries = source.mapping(value, "output")
        source.unknown(entries, _OUTPUT_FIELDS, "the output")
        self._join(join, entries, ("steps", "stepsJoin", ""))
        flow.has_output = bool(join.sources)
        for reference in join.sources:
            if not reference.topic.step:
                source.error(reference.value, "the pipeline answers with its own input; an answer is made of steps")
        if not join.sources:
            read = {ref.topic.step for one in flow.joins.values() for ref in one.parts}
            ends = [name for name in flow.steps if name not in read]
            join.sources = [MessagePart(Topic(flow.name, name, "outputs"), "", flow.value) for name in ends]
        self._rename(join, entries.get("tensorMap"))
        flow.joins[flow.outputs] = join

    def _join(
        self, join: Join, entries: dict[str, YamlValue], names: tuple[str, str, str], *, is_external: bool = False
    ) -> None:
        """Read the sources of a message; ``names`` are the fields for sources, their kind, and triggers."""
        sources, kind, triggers = names
        join.sources = self._references(entries.get(sources), sources, is_external=is_external)
        join.kind = self._source.choice(entries.get(kind), kind, _JOINS) or "inner"
        join.triggers = self._references(entries.get(triggers), triggers, is_external=is_external)
        if triggers:
            of_triggers = entries.get("triggersJoinType")
            join.triggers_kind = self._source.choice(of_triggers, "triggersJoinType", _JOINS) or "inner"
        join.window = entries.get("joinWindowMs")

    def _references(self, value: YamlValue | None, what: str, *, is_external: bool) -> list[MessagePart]:
        found = []
        for item in self._source.sequence(value, what):
            text = self._source.string(item, f"an entry of {what}")
            if item.is_null or (item.kind == "text" and not text.strip()):
                self._source.error(item, f"an entry of {what} is empty")
            elif text:
                reference = self._reference(item, text, is_external=is_external)
                found += [reference] if reference is not None else []
        return found

    def _reference(self, value: YamlValue, text: str, *, is_external: bool) -> MessagePart | None:
        """``step``, ``step.outputs``, ``step.inputs.TENSOR``, or the same of the pipeline, whose inputs can be read.

        Of other pipelines ``pipeline.outputs.TENSOR`` or ``pipeline.step.STEP.outputs.TENSOR``.
        """
        source, flow = self._source, self._flow
        first, *rest = text.split(".")
        step = ""
        if is_external and rest[:1] == ["step"] and len(rest) > 1:
            step, rest = rest[1], rest[2:] or ["outputs"]
        side, tensor = (*rest, "", "")[:2]
        fault = ""
        if (rest and side not in _SIDES) or len(rest) > 2 or not first or "" in rest:
            shapes = "PIPELINE.outputs.TENSOR and PIPELINE.step.STEP.outputs are"
            shapes = shapes if is_external else "STEP, STEP.outputs.TENSOR and STEP.inputs are"
            fault = f"'{shortened(text)}' is no reference; {shapes}"
        elif is_external:
            if first != flow.name:
                return MessagePart(Topic(first, step, side or "outputs"), tensor, value)
            fault = f"'{shortened(text)}' is the pipeline itself"
        elif first == flow.name:
            if side != "outputs":
                return MessagePart(flow.inputs, tensor, value)
            fault = f"'{shortened(text)}' is what the pipeline answers; a step cannot read it"
        elif Topic(flow.name, first, "inputs") in flow.joins:
            return MessagePart(Topic(flow.name, first, side or "outputs"), tensor, value)
        else:
            fault = f"no step is called '{shortened(first)}'{suggestion(first, flow.steps)}"
        source.error(value, fault)
        return None

    def _rename(self, join: Join, value: YamlValue | None, *, is_external: bool = False) -> None:
        """Read a tensorMap; an entry without effect is an error, because Seldon silently ignores it."""
        source = self._source
        read = {(reference.topic, reference.tensor) for reference in join.sources}
        for text, new in source.mapping(value, "tensorMap").items():
            reference = self._reference(new, text, is_external=is_external)
            name = source.string(new, f"the name for '{shortened(text)}'")
            if reference is None or not name:
                continue
            topic, tensor = reference.topic, reference.tensor
            if not tensor:
                source.error(new, f"'{shortened(text)}' of the tensorMap names no tensor")
            elif (topic, tensor) not in read and (topic, "") not in read:
                source.warning(new, f"'{shortened(text)}' of the tensorMap is not among the inputs; it was left out")
            else:
                join.renamed[topic, tensor] = name


def groups(references: Iterable[MessagePart]) -> dict[Topic, dict[str, None]]:
    """The messages that are read, with the tensors read of each, in order; empty: all."""
    found: dict[Topic, dict[str, None]] = {}
    for reference in references:
        found.setdefault(reference.topic, {}).update({reference.tensor: None} if reference.tensor else {})
    return found


class Feedback(NamedTuple):
    """A cycle in a pipeline.

    Attributes:
        entry: Input of the step at which every round begins.
        join: The join in the file.
        source: The message that returns to it.
    """

    entry: Topic
    join: Join
    source: Topic


def cut(joins: dict[Topic, Join], flow: PipelineFlow) -> Feedback | None:
    """Remove the feedback into the one step that takes the request or the feedback; None without such a step."""

    def before(topic: Topic) -> list[Topic]:
        return [part.topic.sink for part in joins[topic].parts] if topic in joins else []

    found = [
        Feedback(sink, join, source)
        for sink, join in joins.items()
        if sink.step and join.kind == "any" and len(groups(join.sources)) == 2 and flow.inputs in groups(join.sources)
        for source in groups(join.sources)
        if source.step and source.side == "outputs" and sink in reached([source.sink], before)
    ]
    if len(found) != 1:
        return None
    ((entry, join, source),) = found
    joins[entry] = replace(join, kind="inner", sources=[one for one in join.sources if one.topic != source])
    return found[0]


def read_model(source: Source, document: YamlValue) -> tuple[str, str]:
    """Name of a ``Model``, and a remark for the steps that call it.

    Source:
        https://github.com/SeldonIO/seldon-core/blob/v2/operator/apis/mlops/v1alpha1/model_types.go
    """
    metadata = source.mapping(document.entries.get("metadata"), "metadata")
    spec = source.mapping(document.entries.get("spec"), "spec")
    name = source.string(metadata.get("name"), "metadata.name")
    uri = source.string(spec.get("storageUri"), "storageUri")
    needs = [source.string(one, "a requirement") for one in source.sequence(spec.get("requirements"), "requirements")]
    parts = [f"Seldon loads it from {shortened(uri)}"] if uri else []
    if parts and any(needs):
        parts[0] += f", for a server with {shortened(', '.join(needs))}"
    for kind in ("explainer", "llm"):
        given = source.mapping(spec.get(kind), kind)
        for target in ("modelRef", "pipelineRef"):
            called = source.string(given.get(target), target)
            parts += [f"by itself it calls {shortened(called)}"] if called else []
    return name, "; ".join(parts)
