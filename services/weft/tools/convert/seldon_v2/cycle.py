"""A pipeline that goes round: a step that takes the request or, later, what another step gives, as a bounded loop."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from weft.tools.convert.seldon_v2.flow import Join, PipelineFlow, Topic
from weft.tools.convert.seldon_v2.presence import Origin, Presence, groups


class Feedback(NamedTuple):
    """Where a cycle is closed.

    Attributes:
        entry: What the step gets that every round begins with.
        join: How the file makes it.
        source: What comes back to it.
    """

    entry: Topic
    join: Join
    source: Topic


def cut(joins: dict[Topic, Join], flow: PipelineFlow) -> Feedback | None:
    """Take what comes back from the one step that gets either the request or that; None where there is no such step."""
    found = [
        Feedback(sink, join, source)
        for sink, join in joins.items()
        if sink.step and join.kind == "any" and len(groups(join.sources)) == 2 and flow.inputs in groups(join.sources)
        for source in groups(join.sources)
        if source.step and source.side == "outputs" and _leads_to(joins, sink, source)
    ]
    if len(found) != 1:
        return None
    ((entry, join, source),) = found
    joins[entry] = replace(join, kind="inner", sources=[one for one in join.sources if one.topic != source])
    return found[0]


def carried(feedback: Feedback, presence: Presence, outputs: Mapping[str, object]) -> dict[Origin, str]:
    """Tensors that come back, by the input of the step that takes each.

    Args:
        feedback: Where the cycle is closed.
        presence: What is there.
        outputs: Those of the step that gives them.
    """
    tensors = groups(feedback.join.sources)[feedback.source]
    given = {name: feedback.join.renamed.get((feedback.source, name), name) for name in tensors or outputs}
    wanted = given.values() if presence.is_unknown(feedback.entry) else presence.wanted(feedback.entry)
    back = {Origin(feedback.source, name): new for name, new in given.items() if new in wanted}
    if not back and len(given) == 1 and len(wanted) == 1:
        back = {Origin(feedback.source, name): new for name in given for new in wanted}
    return back


def _leads_to(joins: Mapping[Topic, Join], sink: Topic, source: Topic) -> bool:
    """Whether a message is made of the answer of the step that gets another."""
    seen: set[Topic] = set()
    pending = [source]
    while pending:
        topic = pending.pop()
        topic = topic._replace(side="inputs") if topic.step else topic
        if topic == sink:
            return True
        if topic in joins and topic not in seen:
            seen.add(topic)
            pending += [one.topic for one in (*joins[topic].sources, *joins[topic].triggers)]
    return False
