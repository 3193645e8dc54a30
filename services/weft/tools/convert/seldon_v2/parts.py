"""The parts of a pipeline, and those of others that it reads."""

import heapq
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from weft.language.compiler.names import MAX_DEPTH
from weft.tools.convert.draft import DraftTensor, legal_name, named_draft
from weft.tools.convert.seldon_v2.cycle import Feedback, cut
from weft.tools.convert.seldon_v2.flow import Join, PipelineFlow, Topic, topics_of
from weft.tools.convert.seldon_v2.presence import Origin
from weft.tools.convert.shared import Interface
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
