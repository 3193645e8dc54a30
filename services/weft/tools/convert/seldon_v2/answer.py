"""A pipeline that answers with the first of several steps: an ensemble of branches."""

from collections.abc import Mapping

from weft.router.operators import ENSEMBLE
from weft.tools.convert.draft import CHECK, DraftCombine
from weft.tools.convert.seldon_v2.flow import Topic
from weft.tools.convert.seldon_v2.presence import Presence, groups


class FirstAnswer:
    """The steps that are called for one of the answers alone, as branches of an ensemble with FIRST.

    Args:
        presence: What is there.
        answer: The message that the graph answers with.
        calls: Answers of steps that it is made of, in order.
        readers: What reads each message.
        is_choice: Whether the answer may be one; not where the pipeline goes round until there is an answer.

    Attributes:
        branches: By the step that ends each, its steps in order; none where the answer is no such choice.
    """

    kind = ENSEMBLE

    def __init__(
        self,
        presence: Presence,
        answer: Topic,
        calls: list[Topic],
        readers: Mapping[Topic, set[Topic]],
        *,
        is_choice: bool = True,
    ) -> None:
        self._answer = answer
        self.branches: dict[Topic, list[Topic]] = {}
        join = presence.join(answer)
        ends = list(groups(join.sources)) if join is not None else []
        if not is_choice:
            return
        is_choice = len(ends) > 1 and join is not None and join.kind != "inner"
        # Where the one step that answers may not run, there is no answer, which is an error of an ensemble.
        if join is None or not (is_choice or (len(ends) == 1 and not presence.is_certain(answer))):
            return
        if any(end.side != "outputs" or readers[end] != {answer} for end in ends) or not self._is_alike(presence, ends):
            return
        self.branches = {end: self._branch(presence, end, calls, readers) for end in ends}

    @property
    def inside(self) -> set[Topic]:
        """Steps of all branches."""
        return {topic for branch in self.branches.values() for topic in branch}

    def combines(self, presence: Presence) -> list[DraftCombine]:
        """One for each output; where none is known, one to be named."""
        known = [DraftCombine(name, "FIRST") for name in presence.names(self._answer)]
        return known or [
            DraftCombine("OUTPUT", "FIRST", remarks=[CHECK + "write the name of the tensor that all give"])
        ]

    def _is_alike(self, presence: Presence, ends: list[Topic]) -> bool:
        """Whether each of the steps gives all the tensors of the answer, if it runs."""
        names = presence.names(self._answer)
        found = {name: presence.find(self._answer, name) for name in names}
        if not names and all(presence.is_unknown(end) for end in ends):
            return True
        return bool(names) and all(
            {one.tensor.topic for one in some} == set(ends) and not any(one.tensor in presence.optional for one in some)
            for some in found.values()
        )

    def _branch(
        self, presence: Presence, end: Topic, calls: list[Topic], readers: Mapping[Topic, set[Topic]]
    ) -> list[Topic]:
        """The step and those before it that nothing else reads and that leave nothing out."""
        inside = {end}
        for topic in reversed(calls):
            read_by = readers.get(topic, set())
            gives = [tensor for tensor in presence.optional if tensor.topic == topic]
            if topic.step and read_by and read_by <= inside and not gives:
                inside |= {topic} if all(self._needs(presence, reader, topic) for reader in read_by) else set()
        return [topic for topic in calls if topic in inside]

    def _needs(self, presence: Presence, reader: Topic, topic: Topic) -> bool:
        """Whether a step cannot run without data of another."""
        join = presence.join(reader._replace(side="inputs"))
        if join is None:
            return False
        sources = groups(join.sources)
        return topic in sources and (join.kind == "inner" or len(sources) == 1)
