"""Collects the parts of a pipeline's graph: messages in order, models, and a unique name for each tensor."""

import heapq
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from weft.language.compiler.names import MAX_DEPTH
from weft.language.pruning import reached
from weft.language.types.signatures import TensorType
from weft.tools.convert.draft import Draft, differs, legal_name
from weft.tools.convert.seldon_v2.flow import Feedback, Join, PipelineFlow, Topic, cut
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Origin, Presence
from weft.tools.convert.signatures import Interface, Signatures, merged
from weft.tools.convert.wiring import cel_name, unused
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened

_RENAMED = "the name '{name}' is that of another tensor, too; here what '{step}' answers is '{new}'"


class PipelineParts:
    """The parts of a pipeline's graph.

    Args:
        flows: All pipelines of the file by name; those that it reads become part of the graph.
        signatures: Of models, and of pipelines that are already converted.
        models: Remarks on models in the file, by name.
    """

    def __init__(
        self,
        source: Source,
        flow: PipelineFlow,
        flows: Mapping[str, PipelineFlow],
        signatures: Signatures,
        models: Mapping[str, str],
    ) -> None:
        self._source = source
        self._flow = flow
        self._flows = flows
        self._signatures = signatures
        self._models = models
        self._draft = Draft.named(source, flow.value, flow.name)
        self._joins: dict[Topic, Join] = {}
        self._interfaces: dict[Topic, Interface | None] = {}
        self._batch_sizes: list[int] = []
        self._unknown: dict[str, YamlValue] = {}
        self._labels: dict[Topic, str] = {}
        self._names: dict[Origin, str] = {}
        self._inputs: dict[str, TensorType] = {}
        self._topics: dict[Topic, list[Topic]] = {}
        self._answering: set[Topic] = set()
        self._in_place: list[Topic] = []
        self._feedback: Feedback | None = None
        self._presence: Presence

    def _collect(self) -> None:
        found: set[Topic] = set()
        pending = list(self._flow.joins)
        while pending:
            topic = pending.pop()
            flow = self._flow if topic.pipeline == self._flow.name else self._flows.get(topic.pipeline)
            sink = topic.sink
            if sink in found or flow is None or sink not in flow.joins:
                continue
            found.add(sink)
            for reference in flow.joins[sink].parts:
                self._expect(reference.topic, reference.value)
                pending.append(reference.topic)
        flows = [*(flow for flow in self._flows.values() if flow.name != self._flow.name), self._flow]
        self._joins = {topic: flow.joins[topic] for flow in flows for topic in flow.joins if topic in found}

    def _expect(self, topic: Topic, value: YamlValue) -> None:
        flow = self._flows.get(topic.pipeline)
        if not topic.step or topic.pipeline == self._flow.name:
            return
        if flow is None:
            place = f"'{topic.pipeline}.step.{topic.step}'"
            self._source.error(value, f"{place} is inside a pipeline that is not in this file; put it here too")
        elif topic.sink not in flow.joins:
            self._source.error(value, f"pipeline '{topic.pipeline}' has no step '{topic.step}'")

    def _ordered(self) -> list[Topic] | None:
        """Messages in topological order; None if there is a cycle."""
        self._topics = {sink: [part.topic for part in join.parts] for sink, join in self._joins.items()}
        depends = {sink: [topic.sink for topic in read] for sink, read in self._topics.items()}
        # Among what is ready, what the file has first comes first.
        places = {topic: i for i, topic in enumerate(self._joins)}
        sorter = TopologicalSorter(depends)
        order: list[Topic] = []
        try:
            sorter.prepare()
            ready = [(places.get(topic, -1), topic) for topic in sorter.get_ready()]
            heapq.heapify(ready)
            while ready:
                topic = heapq.heappop(ready)[1]
                order += [topic] if topic in self._joins else []
                sorter.done(topic)
                for other in sorter.get_ready():
                    heapq.heappush(ready, (places.get(other, -1), other))
        except CycleError as error:
            if self._flow.allows_cycles and self._flow.max_revisits and self._feedback is None:
                self._feedback = cut(self._joins, self._flow)
                if self._feedback is not None:
                    return self._ordered()
            steps = list(dict.fromkeys(str(topic.step or topic.pipeline) for topic in reversed(error.args[1])))
            text = f"cycle: {shortened(' -> '.join([*steps, steps[0]]))}"
            self._source.error(self._flow.value, f"{text}; Weft has bounded loops, but none that this can be made into")
            return None
        depth: dict[Topic, int] = {}
        for topic in order:
            depth[topic] = 1 + max((depth.get(t, 0) for t in self._topics[topic] if t in self._joins), default=0)
            if depth[topic] > MAX_DEPTH:
                self._source.error(self._joins[topic].value, f"references are nested deeper than {MAX_DEPTH}")
                return None
        return order

    def _interface(self, topic: Topic) -> Interface | None:
        key = topic._replace(side="outputs")
        if key not in self._interfaces:
            known = self._signatures
            found = known.model(topic.step) if topic.step else known.graph(topic.pipeline)
            if found is None:
                self._unknown.setdefault(topic.step or topic.pipeline, self._place(topic))
            else:
                self._batch_sizes.append(found.max_batch_size)
            self._interfaces[key] = found
        return self._interfaces[key]

    def _outputs(self, topic: Topic) -> dict[str, TensorType]:
        """Known outputs of the step that gives a message; none for the request."""
        interface = self._interface(topic) if topic != REQUEST else None
        return interface.outputs if interface is not None else {}

    def _place(self, topic: Topic) -> YamlValue:
        if topic.step:
            return self._joins[topic.sink].value
        read = (part for join in self._joins.values() for part in join.parts)
        return next((part.value for part in read if part.topic == topic), self._flow.value)

    def _calls(self, order: list[Topic]) -> list[Topic]:
        calls: dict[Topic, None] = {}
        for sink in order:
            for topic in self._topics[sink]:
                if not topic.step and topic.side == "outputs" and topic not in self._joins:
                    calls.setdefault(topic)
            if sink.step:
                calls.setdefault(sink._replace(side="outputs"))
        for topic in calls:
            name = topic.step or topic.pipeline
            taken = self._labels.values()
            label = name if name not in taken else f"{topic.pipeline}_{name}"
            self._labels[topic] = legal_name(self._source, self._flow.value, label, taken, self._draft.remarks)
        return list(calls)

    def _live(self, topic: Topic) -> set[Topic]:
        return reached([topic], lambda one: self._topics.get(one.sink, []))

    def _readers(self) -> dict[Topic, set[Topic]]:
        readers: dict[Topic, set[Topic]] = {}
        for sink in self._joins:
            for topic in reached(self._topics[sink], lambda one: self._topics.get(one, [])):
                readers.setdefault(topic, set()).add(sink._replace(side="outputs"))
        return readers

    def _bases(self, topic: Topic) -> list[Topic]:
        """Steps whose answers a message contains or waits for."""
        found: dict[Topic, None] = {}
        pending = [topic]
        while pending:
            topic = pending.pop()
            if topic in self._joins:
                pending += reversed(self._topics[topic])
            elif topic.side == "outputs":
                found.setdefault(topic)
        return list(found)

    def _name_tensors(self, calls: list[Topic], branches: Mapping[Topic, list[Topic]]) -> None:
        """Name every tensor in the graph: the pipeline's outputs unchanged, others without clashes."""
        presence, answer = self._presence, self._flow.outputs
        requested = {found.tensor.name for sink in self._joins for found in self._requested(sink)}
        requested |= self._graph_inputs().keys()
        taken = set(requested)
        for name in presence.names(answer):
            for tensor in (found.tensor for found in presence.find(answer, name)):
                if tensor.topic == REQUEST or tensor in self._names:
                    continue
                new = name
                if tensor.topic in branches:
                    pass
                elif name in requested and not presence.is_read(tensor, answer):
                    requested.remove(name)
                    self._in_place.append(tensor.topic)
                elif name in taken:
                    new = self._free(tensor, taken)
                    text = _RENAMED.format(name=name, step=self._labels[tensor.topic], new=new)
                    differs(self._source, self._flow.value, self._draft.remarks, text)
                self._names[tensor] = new
                taken.add(new)
        for topic in calls:
            known = self._outputs(topic) if self._interface(topic) is not None else self._mentioned(topic)
            for tensor in (Origin(topic, name) for name in known):
                if tensor not in self._names:
                    self._names[tensor] = tensor.name if tensor.name not in taken else self._free(tensor, taken)
                    taken.add(self._names[tensor])

    def _requested(self, sink: Topic) -> list[Found]:
        presence = self._presence
        wanted = list(presence.wanted(sink) if sink.step else presence.names(sink))
        found = [one for name in wanted for one in presence.find(sink, name)]
        for reference in self._joins[sink].triggers:
            found += presence.find(reference.topic, reference.tensor) if reference.tensor else []
        return [one for one in found if one.tensor.topic == REQUEST]

    def _graph_inputs(self) -> dict[str, TensorType]:
        """Inputs that the graphs of pipelines in other files read from the request."""
        graphs = [self._interface(topic) for topic in self._labels if not topic.step]
        return merged(interface.inputs for interface in graphs if interface is not None)

    def _mentioned(self, topic: Topic) -> dict[str, None]:
        """Outputs that the file names of a step without a signature."""
        found: dict[str, None] = {}
        for join in self._joins.values():
            found |= {part.tensor: None for part in join.parts if part.topic == topic and part.tensor}
            found |= {name: None for source, name in join.renamed if source == topic}
        return found

    def _free(self, tensor: Origin, taken: set[str]) -> str:
        name = f"{self._labels[tensor.topic]}_{tensor.name}"
        return unused("".join(c if c.isalnum() or c == "_" else "_" for c in name), taken)

    def _spoken(self, tensor: Origin) -> str:
        """CEL that is true if a tensor is present, or a step answered."""
        if not tensor.name:
            sure = [name for name, one in self._outputs(tensor.topic).items() if not one.is_optional]
            if not sure:
                return f"has({cel_name('steps', self._labels[tensor.topic])})"
            tensor = Origin(tensor.topic, sure[0])
        return f"has({cel_name('inputs', self._named(tensor))})"

    def _named(self, tensor: Origin) -> str:
        return tensor.name if tensor.topic == REQUEST else self._names.get(tensor, tensor.name)

    def _output_map(self, topic: Topic) -> dict[str, str]:
        return {t.name: new for t, new in self._names.items() if t.topic == topic and t.name != new}
