"""Names of the tensors of a pipeline in the graph."""

import heapq
import json
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from weft.language.compiler.names import MAX_DEPTH
from weft.tools.convert.draft import DraftTensor, differs, legal_name, named_draft
from weft.tools.convert.seldon_v2.answer import FirstAnswer
from weft.tools.convert.seldon_v2.cycle import Feedback, cut
from weft.tools.convert.seldon_v2.flow import Join, PipelineFlow, Topic, topics_of
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Origin, Presence
from weft.tools.convert.shared import Interface, merged
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source, YamlValue, shortened


class PipelineParts:
    """What a graph of a pipeline is made of: messages in order, models, and which of them the answer needs.

    Args:
        source: The file.
        flow: The pipeline.
        flows: All pipelines of the file by name: what it reads of them becomes part of the graph.
        signatures: Of models, and of pipelines that are graphs already.
        models: What the file says of models, by name.
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
        self._draft = named_draft(source, flow.value, flow.name)
        self._joins: dict[Topic, Join] = {}
        self._interfaces: dict[Topic, Interface | None] = {}
        self._batch_sizes: list[int] = []
        self._unknown: dict[str, YamlValue] = {}
        self._labels: dict[Topic, str] = {}
        self._names: dict[Origin, str] = {}
        self._inputs: dict[str, DraftTensor] = {}
        self._topics: Mapping[Topic, list[Topic]] = {}
        self._answering: set[Topic] = set()
        self._in_place: list[Topic] = []
        self._feedback: Feedback | None = None

    def _collect(self) -> None:
        """The joins of the pipeline, and of others those that it needs."""
        pending = list(self._flow.joins)
        while pending:
            topic = pending.pop()
            flow = self._flow if topic.pipeline == self._flow.name else self._flows.get(topic.pipeline)
            sink = topic._replace(side="inputs") if topic.step else topic
            if sink in self._joins or flow is None or sink not in flow.joins:
                continue
            join = self._joins[sink] = flow.joins[sink]
            for reference in (*join.sources, *join.triggers):
                self._expect(reference.topic, reference.value)
                pending.append(reference.topic)
        self._joins = {topic: self._joins[topic] for topic in self._file_order()}

    def _expect(self, topic: Topic, value: object) -> None:
        """Report what another pipeline does not have, or what only its file says."""
        flow = self._flows.get(topic.pipeline)
        if not topic.step or topic.pipeline == self._flow.name:
            return
        if flow is None:
            text = (
                f"'{topic.pipeline}.step.{topic.step}' is inside a pipeline that is not in this file; put it here too"
            )
            self._source.error(value, text)  # type: ignore[arg-type]
        elif topic._replace(side="inputs") not in flow.joins:
            text = f"pipeline '{topic.pipeline}' has no step '{topic.step}'"
            self._source.error(value, text)  # type: ignore[arg-type]

    def _ordered(self) -> list[Topic] | None:
        """Messages in an order in which each is made of those before it; None where there is none."""
        self._topics = topics_of(self._joins)
        depends = {
            sink: [t._replace(side="inputs") if t.step else t for t in read] for sink, read in self._topics.items()
        }
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

    def _file_order(self) -> list[Topic]:
        flows = [flow for flow in self._flows.values() if flow.name != self._flow.name]
        return [topic for flow in (*flows, self._flow) for topic in flow.joins if topic in self._joins]

    def _interface(self, topic: Topic) -> Interface | None:
        """Tensors of the model, or of the pipeline in another file, that gives or gets a message."""
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

    def _place(self, topic: Topic) -> YamlValue:
        """Where the file has a step, or names another pipeline."""
        if topic.step:
            return self._joins[topic._replace(side="inputs")].value
        read = (part for join in self._joins.values() for part in (*join.sources, *join.triggers))
        return next((part.value for part in read if part.topic == topic), self._flow.value)

    def _calls(self, order: list[Topic]) -> list[Topic]:
        """Answers of all steps, and of graphs that the pipeline reads, in order."""
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
        """What the answer is made of."""
        live: set[Topic] = set()
        pending = [topic]
        while pending:
            topic = pending.pop()
            if topic not in live:
                live.add(topic)
                pending += self._topics.get(topic._replace(side="inputs") if topic.step else topic, [])
        return live

    def _readers(self) -> dict[Topic, set[Topic]]:
        """Answers of steps by what is made of them, directly or through what another step gets."""
        readers: dict[Topic, set[Topic]] = {}
        for sink in self._joins:
            pending = list(self._topics[sink])
            while pending:
                topic = pending.pop()
                readers.setdefault(topic, set()).add(sink._replace(side="outputs"))
                pending += self._topics.get(topic, [])
        return readers

    def _bases(self, topic: Topic) -> list[Topic]:
        """The steps whose answers a message is made of, those that it waits for among them."""
        found: dict[Topic, None] = {}
        pending = [topic]
        while pending:
            topic = pending.pop()
            if topic in self._joins:
                pending += reversed(self._topics[topic])
            elif topic.side == "outputs":
                found.setdefault(topic)
        return list(found)


_RENAMED = "the name '{name}' is that of another tensor, too; here what '{step}' answers is '{new}'"


class PipelineNames(PipelineParts):
    """Every tensor by a name of its own in the graph."""

    def _name_tensors(self, presence: Presence, calls: list[Topic], first: FirstAnswer) -> None:
        """Name every tensor in the graph: what the pipeline answers with as there, others so that none clashes."""
        requested = {found.tensor.name for sink in self._joins for found in self._requested(presence, sink)}
        requested |= self._graph_inputs().keys()
        taken = set(requested)
        for name in presence.names(self._flow.outputs):
            for found in presence.find(self._flow.outputs, name):
                if found.tensor.topic == REQUEST or found.tensor in self._names:
                    continue
                if found.tensor.topic in first.branches:
                    self._names[found.tensor] = name
                    taken.add(name)
                    continue
                new = name
                if name in requested and not presence.is_read(found.tensor, self._flow.outputs):
                    requested.remove(name)
                    self._in_place.append(found.tensor.topic)
                elif name in taken:
                    new = self._free(f"{self._labels[found.tensor.topic]}_{name}", taken)
                    text = _RENAMED.format(name=name, step=self._labels[found.tensor.topic], new=new)
                    differs(self._source, self._flow.value, self._draft.remarks, text)
                self._names[found.tensor] = new
                taken.add(new)
        for topic in calls:
            interface = self._interface(topic)
            known = interface.outputs if interface is not None else self._mentioned(topic)
            for name in known:
                if Origin(topic, name) not in self._names:
                    free = name if name not in taken else self._free(f"{self._labels[topic]}_{name}", taken)
                    self._names[Origin(topic, name)] = free
                    taken.add(free)

    def _requested(self, presence: Presence, sink: Topic) -> list[Found]:
        wanted = list(presence.wanted(sink) if sink.step else presence.names(sink))
        found = [one for name in wanted for one in presence.find(sink, name)]
        for reference in self._joins[sink].triggers:
            found += presence.find(reference.topic, reference.tensor) if reference.tensor else []
        return [one for one in found if one.tensor.topic == REQUEST]

    def _graph_inputs(self) -> dict[str, DraftTensor]:
        """What the graphs of pipelines in other files read of the request."""
        graphs = [self._interface(topic) for topic in self._labels if not topic.step]
        return merged(interface.inputs for interface in graphs if interface is not None)

    def _mentioned(self, topic: Topic) -> dict[str, None]:
        """Outputs of a step without a signature that the file names."""
        found: dict[str, None] = {}
        for join in self._joins.values():
            for reference in (*join.sources, *join.triggers):
                if reference.topic == topic and reference.tensor:
                    found.setdefault(reference.tensor)
            for source, name in join.renamed:
                if source == topic:
                    found.setdefault(name)
        return found

    def _free(self, name: str, taken: set[str]) -> str:
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        while name in taken:
            name += "_"
        return name

    def _spoken(self, tensor: Origin) -> str:
        """CEL that holds where a tensor is there, or where a step answered."""
        if not tensor.name:
            interface = self._interface(tensor.topic)
            sure = [n for n, one in interface.outputs.items() if not one.is_optional] if interface is not None else []
            if not sure:
                label = self._labels[tensor.topic]
                return f"has(steps.{label})" if label.isidentifier() else f"has(steps[{json.dumps(label)}])"
            tensor = Origin(tensor.topic, sure[0])
        return f"has({reference('inputs', self._named(tensor))})"

    def _named(self, tensor: Origin) -> str:
        return tensor.name if tensor.topic == REQUEST else self._names.get(tensor, tensor.name)

    def _output_map(self, topic: Topic) -> dict[str, str]:
        return {t.name: new for t, new in self._names.items() if t.topic == topic and t.name != new}


def reference(space: str, name: str) -> str:
    """A tensor in CEL."""
    return f"{space}.{name}" if name.isidentifier() else f"{space}[{json.dumps(name)}]"
