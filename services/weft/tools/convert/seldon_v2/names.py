"""Names of the tensors of a pipeline in the graph."""

import json

from weft.tools.convert.draft import DraftTensor, differs
from weft.tools.convert.seldon_v2.answer import FirstAnswer
from weft.tools.convert.seldon_v2.flow import Topic
from weft.tools.convert.seldon_v2.parts import PipelineParts
from weft.tools.convert.seldon_v2.presence import REQUEST, Found, Origin, Presence
from weft.tools.convert.shared import merged

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
