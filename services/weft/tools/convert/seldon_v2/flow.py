"""A pipeline as the joins of messages that its file declares.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v2/operator/apis/mlops/v1alpha1/pipeline_types.go
    https://github.com/SeldonIO/seldon-core/blob/v2/scheduler/pkg/store/pipeline/validate.go
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.resolve import MAX_ENTRIES
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
    """A message of a pipeline: what goes into or comes out of a step, or with ``step`` "" of the pipeline."""

    pipeline: str
    step: str
    side: str

    def __str__(self) -> str:
        return f"{self.step or self.pipeline}.{self.side}"


class MessagePart(NamedTuple):
    """A message that is read: one tensor of it, or with ``tensor`` "" all."""

    topic: Topic
    tensor: str
    value: YamlValue


@dataclass(slots=True)
class Join:
    """The message that several make.

    Attributes:
        value: Its place in the file.
        sources: What its tensors come from.
        kind: "inner", "outer" or "any" of them are needed.
        renamed: Tensors that have another name in it.
        triggers: What else must be there.
        triggers_kind: How many of the triggers must be there.
        window: Where the file says how long sources are waited for.
        batch: Where the file says how many rows it waits for.
    """

    value: YamlValue
    sources: list[MessagePart] = field(default_factory=list)
    kind: str = "inner"
    renamed: dict[tuple[Topic, str], str] = field(default_factory=dict)
    triggers: list[MessagePart] = field(default_factory=list)
    triggers_kind: str = "inner"
    window: YamlValue | None = None
    batch: YamlValue | None = None


@dataclass(slots=True)
class PipelineFlow:
    """One pipeline.

    Attributes:
        value: Its place in the file.
        name: Its name.
        joins: By the message that they make; of a pipeline that reads no other, none makes its inputs.
        has_output: Whether the file says what it answers.
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
        """What the pipeline gets."""
        return Topic(self.name, "", "inputs")

    @property
    def outputs(self) -> Topic:
        """What the pipeline answers."""
        return Topic(self.name, "", "outputs")

    @property
    def steps(self) -> list[str]:
        """Names of its steps."""
        return [topic.step for topic in self.joins if topic.step]


def read_flow(source: Source, document: YamlValue, name: str) -> PipelineFlow | None:
    """The flow of one document; errors are reported to ``source``, None where there is nothing to go on with."""
    return _FlowReader(source, PipelineFlow(document, name)).run()


class _FlowReader:
    def __init__(self, source: Source, flow: PipelineFlow) -> None:
        self._source = source
        self._flow = flow

    def run(self) -> PipelineFlow | None:
        source, flow = self._source, self._flow
        spec_value = flow.value.entries.get("spec")
        spec = source.mapping(spec_value, "spec") if spec_value is not None else {}
        source.unknown(spec, _SPEC_FIELDS, "the spec")
        given = source.sequence(spec.get("steps"), "steps")
        if not 0 < len(given) <= MAX_ENTRIES:
            text = f"has {len(given)} steps; the limit of Weft is {MAX_ENTRIES}" if given else "has no 'steps'"
            source.error(spec_value or flow.value, f"the Pipeline {text}")
            return None
        flow.allows_cycles = source.boolean(spec.get("allowCycles"), "allowCycles")
        flow.max_revisits = int(source.number(spec.get("maxStepRevisits"), "maxStepRevisits") or 0)
        for value in given:
            self._name_step(value)
        for value in given:
            if value.kind == "mapping":
                self._step(value)
        self._input(spec.get("input"))
        self._output(spec.get("output"))
        return flow

    def _name_step(self, value: YamlValue) -> None:
        source, flow = self._source, self._flow
        name = source.string(source.mapping(value, "a step").get("name"), "name")
        if not name:
            if value.kind == "mapping":
                source.error(value, "the step has no 'name'")
            return
        topic = Topic(flow.name, name, "inputs")
        if name == flow.name:
            source.error(value.entries["name"], f"step '{shortened(name)}' has the name of its pipeline")
        elif "." in name:
            source.error(
                value.entries["name"], f"step '{shortened(name)}' has a '.' in its name, which divides references"
            )
        elif topic in flow.joins:
            source.error(value.entries["name"], f"a second step is called '{shortened(name)}'")
        flow.joins[topic] = Join(value)

    def _step(self, value: YamlValue) -> None:
        source, flow, entries = self._source, self._flow, value.entries
        join = flow.joins.get(Topic(flow.name, entries.get("name", value).text, "inputs"))
        if join is None or join.value is not value:
            return
        source.unknown(entries, _STEP_FIELDS, "the step")
        join.sources = self._references(entries.get("inputs"), "inputs")
        if not join.sources:
            join.sources = [MessagePart(flow.inputs, "", value)]
        join.kind = self._join_type(entries.get("inputsJoinType"), "inputsJoinType")
        join.triggers = self._references(entries.get("triggers"), "triggers")
        join.triggers_kind = self._join_type(entries.get("triggersJoinType"), "triggersJoinType")
        join.window, join.batch = entries.get("joinWindowMs"), entries.get("batch")
        if join.batch is not None:
            source.unknown(source.mapping(join.batch, "batch"), _BATCH_FIELDS, "the batch")
        self._rename(join, entries.get("tensorMap"))

    def _input(self, value: YamlValue | None) -> None:
        if value is None:
            return
        source, flow = self._source, self._flow
        entries = source.mapping(value, "input")
        source.unknown(entries, _INPUT_FIELDS, "the input")
        join = Join(value, self._references(entries.get("externalInputs"), "externalInputs", is_external=True))
        join.kind = self._join_type(entries.get("joinType"), "joinType")
        join.triggers = self._references(entries.get("externalTriggers"), "externalTriggers", is_external=True)
        join.triggers_kind = self._join_type(entries.get("triggersJoinType"), "triggersJoinType")
        join.window = entries.get("joinWindowMs")
        if not join.sources:
            source.error(value, "the input of the pipeline has no 'externalInputs'")
        self._rename(join, entries.get("tensorMap"), is_external=True)
        flow.joins[flow.inputs] = join

    def _output(self, value: YamlValue | None) -> None:
        source, flow = self._source, self._flow
        entries = source.mapping(value, "output") if value is not None else {}
        source.unknown(entries, _OUTPUT_FIELDS, "the output")
        join = Join(value or flow.value, self._references(entries.get("steps"), "steps"))
        flow.has_output = bool(join.sources)
        for reference in join.sources:
            if not reference.topic.step:
                source.error(reference.value, "the pipeline answers with its own input; an answer is made of steps")
        join.kind = self._join_type(entries.get("stepsJoin"), "stepsJoin")
        join.window = entries.get("joinWindowMs")
        if not join.sources:
            read = {ref.topic.step for one in flow.joins.values() for ref in (*one.sources, *one.triggers)}
            ends = [name for name in flow.steps if name not in read]
            join.sources = [MessagePart(Topic(flow.name, name, "outputs"), "", flow.value) for name in ends]
        self._rename(join, entries.get("tensorMap"))
        flow.joins[flow.outputs] = join

    def _join_type(self, value: YamlValue | None, what: str) -> str:
        return (self._source.choice(value, what, _JOINS) or "inner") if value is not None else "inner"

    def _references(self, value: YamlValue | None, what: str, *, is_external: bool = False) -> list[MessagePart]:
        read = self._external if is_external else self._internal
        found = []
        for item in self._source.sequence(value, what):
            text = self._source.string(item, f"an entry of {what}")
            if item.is_null or (item.kind == "text" and not text.strip()):
                self._source.error(item, f"an entry of {what} is empty")
            elif text:
                reference = read(item, text)
                found += [reference] if reference is not None else []
        return found

    def _internal(self, value: YamlValue, text: str) -> MessagePart | None:
        """``step``, ``step.outputs``, ``step.inputs.TENSOR``, or the same of the pipeline, whose inputs can be read."""
        source, flow = self._source, self._flow
        first, *rest = text.split(".")
        if (rest and rest[0] not in _SIDES) or len(rest) > 2 or not first or "" in rest:
            source.error(value, f"'{shortened(text)}' is no reference; STEP, STEP.outputs.TENSOR and STEP.inputs are")
            return None
        if first == flow.name:
            if rest[:1] == ["outputs"]:
                source.error(value, f"'{shortened(text)}' is what the pipeline answers; a step cannot read it")
                return None
            return MessagePart(flow.inputs, rest[1] if len(rest) > 1 else "", value)
        if Topic(flow.name, first, "inputs") not in flow.joins:
            hint = suggestion(first, flow.steps)
            source.error(value, f"no step is called '{shortened(first)}'{hint}")
            return None
        return MessagePart(Topic(flow.name, first, rest[0] if rest else "outputs"), (*rest, "", "")[1], value)

    def _external(self, value: YamlValue, text: str) -> MessagePart | None:
        """``pipeline.outputs.TENSOR`` or ``pipeline.step.STEP.outputs.TENSOR``."""
        first, *rest = text.split(".")
        step = ""
        if rest[:1] == ["step"] and len(rest) > 1:
            step, rest = rest[1], rest[2:] or ["outputs"]
        if (rest and rest[0] not in _SIDES) or len(rest) > 2 or not first or "" in rest:
            text = f"'{shortened(text)}' is no reference; PIPELINE.outputs.TENSOR and PIPELINE.step.STEP.outputs are"
            self._source.error(value, text)
            return None
        if first == self._flow.name:
            self._source.error(value, f"'{shortened(text)}' is the pipeline itself")
            return None
        return MessagePart(Topic(first, step, rest[0] if rest else "outputs"), (*rest, "", "")[1], value)

    def _rename(self, join: Join, value: YamlValue | None, *, is_external: bool = False) -> None:
        """Read a tensorMap; an entry without effect is an error, because Seldon ignores it without a word."""
        source = self._source
        read = {(reference.topic, reference.tensor) for reference in join.sources}
        for text, new in (source.mapping(value, "tensorMap") if value is not None else {}).items():
            reference = (self._external if is_external else self._internal)(new, text)
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


def topics_of(joins: Mapping[Topic, Join]) -> dict[Topic, list[Topic]]:
    """What each message is made of, triggers included."""
    return {sink: [ref.topic for ref in (*join.sources, *join.triggers)] for sink, join in joins.items()}
