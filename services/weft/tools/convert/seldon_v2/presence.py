"""Determines which tensors a pipeline's message has, and when the message exists.

Presence is a monotone function of the request's inputs and of the outputs that models leave out, by the joins. So an
input without which the pipeline gives no answer is a required one.

Source:
    https://github.com/SeldonIO/seldon-core/blob/v2/scheduler/data-flow/src/main/kotlin/io/seldon/dataflow/kafka/Joiner.kt
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from weft.tools.convert.seldon_v2.flow import Join, MessagePart, Topic, groups
from weft.tools.convert.signatures import Interface

#: What a request brings, whichever pipeline of the file gets it.
REQUEST = Topic("", "", "inputs")


class Origin(NamedTuple):
    """The origin of a tensor: an output of a step, or with ``REQUEST`` an input of the graph."""

    topic: Topic
    name: str


class Found(NamedTuple):
    """A possible tensor of a message, from its source ``group``; ``is_named``: the file or a signature names it."""

    tensor: Origin
    group: Topic
    is_named: bool


_Term = bool | str | tuple[str, tuple["_Term", ...]]
_NOWHERE: frozenset[Topic] = frozenset()


class Presence:
    """Presence of tensors and messages.

    Args:
        joins: Of all pipelines, by resulting message; acyclic.
        interface: Inputs and outputs of the step that gives a message; None: unknown.
        order: The keys of ``joins`` in topological order.
        answer: The message that the graph answers with.
        spoken: CEL for the presence of a tensor, or with name "" for a step's having answered.
    """

    def __init__(
        self,
        joins: Mapping[Topic, Join],
        interface: Callable[[Topic], Interface | None],
        order: list[Topic],
        answer: Topic,
        spoken: Callable[[Origin], str],
    ) -> None:
        self._joins = joins
        self._interface = interface
        self._order = order
        self._answer = answer
        self._spoken = spoken
        self.optional: frozenset[Origin] = frozenset()
        self._certain: dict[Topic, bool] = {}
        self._found: dict[tuple[Topic, str], list[Found]] = {}
        self._settle()

    def _settle(self) -> None:
        """Find tensors that may be absent: outputs that models omit, and inputs that are not required."""
        outputs = {
            Origin(topic._replace(side="outputs"), name)
            for topic in self._order
            if topic.step and (interface := self._interface(topic)) is not None
            for name, tensor in interface.outputs.items()
            if tensor.is_optional
        }
        outputs |= {tensor for tensor in self.decisive() if self._interface(tensor.topic) is None}
        inputs = {found.tensor for topic in self._order for found in self._read(topic) if found.tensor.topic == REQUEST}
        unneeded = {tensor for tensor in inputs if self._made({tensor})[self._answer]}
        self.optional = frozenset(outputs | unneeded)
        self._certain = self._made(self.optional)

    def decisive(self) -> set[Origin]:
        """Outputs of steps that decide what is called: named triggers, and tensors of alternatives."""
        found: set[Origin] = set()
        feeding: set[Topic] = set()  # what alternatives are made of
        for topic in reversed(self._order):
            join = self._joins[topic]
            is_choice = topic in feeding or (join.kind != "inner" and len(groups(join.sources)) > 1)
            if is_choice:
                feeding |= {reference.topic.sink for reference in join.sources}
            for reference in (*join.triggers, *(join.sources if is_choice else ())):
                if reference.tensor:
                    found |= {one.tensor for one in self.find(reference.topic, reference.tensor)}
        return {tensor for tensor in found if tensor.topic != REQUEST}

    def is_certain(self, topic: Topic, tensor: str = "") -> bool:
        """Whether each request has the message (such as a step's answer), with the tensor if one is given."""
        found = self.find(topic, tensor) if tensor else []
        return self._exists(topic, self._certain) and (not tensor or any(self.is_present(one.tensor) for one in found))

    def is_present(self, tensor: Origin) -> bool:
        """Whether each request has the tensor."""
        return tensor not in self.optional and self.is_certain(tensor.topic)

    def find(self, topic: Topic, name: str) -> list[Found]:
        """Possible origins of a message's tensor; those that the file names come first."""
        if (topic, name) not in self._found:
            self._found[topic, name] = self._find(topic, name)
        return self._found[topic, name]

    def _find(self, topic: Topic, name: str) -> list[Found]:
        join = self._joins.get(topic)
        if join is None:
            if topic.side == "inputs":
                return [Found(Origin(REQUEST, name), topic, False)]
            interface = self._interface(topic)
            known = interface is not None
            return [] if interface and name not in interface.outputs else [Found(Origin(topic, name), topic, known)]
        every = [
            Found(found.tensor, group, found.is_named or bool(tensors) or original != name)
            for group, tensors in groups(join.sources).items()
            for original in _originals(join, group, name)
            if not tensors or original in tensors
            for found in self.find(group, original)
        ]
        named = [found for found in every if found.is_named]
        first: dict[tuple[Origin, Topic], Found] = {}
        for found in named or every:
            first.setdefault((found.tensor, found.group), found)
        return list(first.values())

    def names(self, topic: Topic) -> dict[str, None]:
        """The known tensors of a message."""
        join = self._joins.get(topic)
        if join is None:
            interface = self._interface(topic) if topic.side == "outputs" else None
            return dict.fromkeys(interface.outputs) if interface is not None else {}
        found: dict[str, None] = {}
        for group, tensors in groups(join.sources).items():
            renamed = [name for source, name in join.renamed if source == group and not tensors]
            for name in (*(tensors or self.names(group)), *renamed):
                found.setdefault(join.renamed.get((group, name), name))
        return found

    def wanted(self, topic: Topic) -> dict[str, bool]:
        """Inputs of the step that gets a message, and whether each is required; without a signature those named."""
        interface = self._interface(topic)
        if interface is not None:
            return {name: not tensor.is_optional for name, tensor in interface.inputs.items()}
        return dict.fromkeys(self.names(topic), True)

    def when(self, topic: Topic, inside: Iterable[Topic] = ()) -> str:
        """CEL that holds if the message exists, with its step's required inputs; "" if it always does.

        Args:
            inside: Answers of steps whose own conditions are to be included.
        """
        return _text(self._runs_if(topic, frozenset(inside)))

    def when_found(self, sink: Topic, found: Iterable[Found]) -> str:
        """CEL that holds if all of some tensors are in a message; "" if they always are."""
        return _text(_term("&&", [self._found_if(sink, one, _NOWHERE) for one in found]))

    def _runs_if(self, topic: Topic, inside: frozenset[Topic]) -> _Term:
        needed = [name for name, is_required in self.wanted(topic).items() if is_required] if topic.step else []
        some = [self.find(topic, name) for name in needed]
        given = [_term("||", [self._found_if(topic, one, inside) for one in found]) for found in some if found]
        return _term("&&", [self._made_if(topic, inside), *given])

    def _found_if(self, sink: Topic, found: Found, inside: frozenset[Topic]) -> _Term:
        """When a tensor is in a message: its source, and the tensor itself."""
        join = self._joins.get(sink)
        sources = [self._read_if(one, inside) for one in (join.sources if join else ()) if one.topic == found.group]
        return _term("&&", [_term("||", sources), self._has_if(found, inside)])

    def _made_if(self, topic: Topic, inside: frozenset[Topic]) -> _Term:
        join = self._joins.get(topic)
        if join is None or self.is_certain(topic):
            return True
        sources = _term("&&" if join.kind == "inner" else "||", [self._read_if(ref, inside) for ref in join.sources])
        triggers = [self._read_if(ref, inside) for ref in join.triggers]
        return _term("&&", [sources, _term("&&" if join.triggers_kind == "inner" else "||", triggers)])

    def _read_if(self, reference: MessagePart, inside: frozenset[Topic]) -> _Term:
        topic = reference.topic
        if reference.tensor:
            tensors = _term("||", [self._has_if(found, inside) for found in self.find(topic, reference.tensor)])
            return _term("&&", [self._made_if(topic, inside), tensors])
        if not topic.step or topic.side == "inputs":
            return self._made_if(topic, inside)
        return self._answered_if(topic, inside)

    def _has_if(self, found: Found, inside: frozenset[Topic]) -> _Term:
        tensor = found.tensor
        if self.is_present(tensor):
            return True
        return self._answered_if(tensor.topic, inside) if tensor.topic in inside else self._spoken(tensor)

    def _answered_if(self, topic: Topic, inside: frozenset[Topic]) -> _Term:
        if self.is_certain(topic):
            return True
        if topic in inside:
            return self._runs_if(topic._replace(side="inputs"), inside)
        return self._spoken(Origin(topic, ""))

    def is_read(self, tensor: Origin, answer: Topic) -> bool:
        """Whether any message other than the answer has the tensor, or waits for it."""
        return any(found.tensor == tensor for topic in self._order if topic != answer for found in self._read(topic))

    def _read(self, topic: Topic) -> Iterable[Found]:
        for name in self.wanted(topic) if topic.step else self.names(topic):
            yield from self.find(topic, name)
        for reference in self._joins[topic].triggers:
            if reference.tensor:
                yield from self.find(reference.topic, reference.tensor)

    def _made(self, absent: Iterable[Origin]) -> dict[Topic, bool]:
        """Messages that are made if some tensors are absent."""
        made: dict[Topic, bool] = {}
        off = frozenset(absent)
        for topic in self._order:
            join = self._joins[topic]
            made[topic] = _joined(join.kind, [self._has(ref, made, off) for ref in join.sources]) and _joined(
                join.triggers_kind, [self._has(ref, made, off) for ref in join.triggers]
            )
            if topic.step and made[topic]:
                made[topic] = all(
                    not found or any(self._is_in(one, made, off) for one in found)
                    for name, is_required in self.wanted(topic).items()
                    if is_required
                    for found in [self.find(topic, name)]
                )
        return made

    def _has(self, reference: MessagePart, made: Mapping[Topic, bool], off: frozenset[Origin]) -> bool:
        if not self._exists(reference.topic, made):
            return False
        found = self.find(reference.topic, reference.tensor) if reference.tensor else []
        return not reference.tensor or any(self._is_in(one, made, off) for one in found)

    def _is_in(self, found: Found, made: Mapping[Topic, bool], off: frozenset[Origin]) -> bool:
        return found.tensor not in off and self._exists(found.tensor.topic, made) and self._exists(found.group, made)

    def _exists(self, topic: Topic, made: Mapping[Topic, bool]) -> bool:
        return made.get(topic.sink, True)


def _originals(join: Join, group: Topic, name: str) -> list[str]:
    """Names in a source of the tensors called ``name`` in the message."""
    renamed = [old for (topic, old), new in join.renamed.items() if topic == group and new == name]
    return renamed if (group, name) in join.renamed else [*renamed, name]


def _joined(kind: str, present: list[bool]) -> bool:
    return not present or (all(present) if kind == "inner" else any(present))


def _term(operator: str, terms: Iterable[_Term]) -> _Term:
    """Terms as one, each once; what always holds is left out of an "&&", and is all of an "||"."""
    flat: dict[_Term, None] = {}
    for term in terms:
        parts = term[1] if isinstance(term, tuple) and term[0] == operator else (term,)
        flat.update(dict.fromkeys(parts))
    if operator == "||" and (True in flat or not flat):
        return True
    left = tuple(term for term in flat if term is not True)
    return (left[0] if len(left) == 1 else (operator, left)) if left else True


def _text(term: _Term) -> str:
    if isinstance(term, tuple):
        parts = [f"({_text(one)})" if isinstance(one, tuple) else _text(one) for one in term[1]]
        return f" {term[0]} ".join(parts)
    return term if isinstance(term, str) else ""
