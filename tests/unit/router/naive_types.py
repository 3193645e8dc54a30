"""What is known of a random graph without running it, by the description of the language alone.

Which tensors may be absent, and which steps of a sequence run.
"""

from collections.abc import Collection, Iterator
from functools import cache

from tests.unit.router.random_graphs import Model, Node, Step, Test

from weft.router.combine import METHODS
from weft.router.operators.cascade import CascadePlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.map import MapPlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.switch import SwitchPlan


@cache
def may_be_absent(node: Node) -> frozenset[str]:
    """Tensors of a node that may be absent."""
    absent = {"E"}
    if node.kind is SequencePlan:
        for step in node.steps:
            absent |= given_perhaps(node, step)
    return frozenset(absent)


@cache
def outputs_that_may_be_absent(node: Node) -> frozenset[str]:
    """Outputs of a node that may be absent."""
    if node.kind is SequencePlan:
        return may_be_absent(node).intersection(node.outputs)
    if node.kind is MapPlan:
        return frozenset()
    perhaps = [given_perhaps(node, step) for step in node.steps]
    if node.kind is not EnsemblePlan:
        lacking = [set(node.outputs).difference(tensor for _, tensor in step.outputs) for step in node.steps]
        return frozenset[str]().union(*perhaps, *lacking)
    if node.method is METHODS["FIRST"]:
        is_race = node.quorum <= 1 and len(node.steps) > 1
        answers = [
            answered_perhaps(step) if is_race else found for step, found in zip(node.steps, perhaps, strict=True)
        ]
        return frozenset({"Y"}.intersection(*answers) if not is_race else frozenset[str]().union(*answers) & {"Y"})
    if node.method is METHODS["MERGE"]:
        return frozenset[str]().union(*map(answered_perhaps, node.steps))
    if any(not found for found in perhaps) or not any(map(answered_perhaps, node.steps)):  # at least one has answered
        return frozenset()
    return frozenset({"Y"})


def answered_perhaps(step: Step) -> frozenset[str]:
    """Tensors that a step may leave out though it has answered."""
    absent = frozenset[str]()
    for one in step.chain:
        inner = outputs_that_may_be_absent(one.target) if isinstance(one.target, Node) else one.target.leaves_out
        absent |= {tensor for name, tensor in one.outputs if name in inner}
    return absent.difference(step.defaults)


def given_perhaps(node: Node, step: Step) -> frozenset[str]:
    """Tensors that a step may leave out, because it has not answered or though it has."""
    absent = answered_perhaps(step)
    may_fail = step.is_soft and node.kind is not CascadePlan
    may_be_skipped = bool(step.when) and node.kind not in (SwitchPlan, CascadePlan)
    if may_fail or may_be_skipped:
        absent |= {tensor for _, tensor in step.outputs if tensor not in step.defaults}
    return absent


def tests_of(step: Step) -> Iterator[Test]:
    """Every test of a step that is made before it runs."""
    for one in step.chain:
        yield from one.when


def read_by(step: Step) -> set[str]:
    """Tensors, and `steps.<name>`, that a step reads; its fallbacks too."""
    return {test.name for test in tests_of(step)} | {tensor for one in step.chain for _, tensor in one.inputs}


def live_steps(node: Node, wanted: Collection[str]) -> list[int]:
    """Indexes of the steps of a sequence that run, where those of its outputs are wanted, ascending."""
    return _live(node, wanted)[0]


def read_in(node: Node, wanted: Collection[str]) -> set[str]:
    """Tensors of a node that somebody reads, where those of its outputs are wanted; `accept` reads as well."""
    if node.kind is SequencePlan:
        return _live(node, wanted)[1]
    if node.kind in (EnsemblePlan, MapPlan):
        return {"Y"}
    return {*wanted, *(step.accept.name for step in node.steps if step.accept is not None)}


def waits_for(node: Node, step: Step, live: Collection[str]) -> set[str]:
    """Names of the steps that a step of a sequence waits for, of those that run."""
    producers = {tensor: other.name for other in node.steps for _, tensor in other.outputs}
    read = read_by(step)
    names = {producers[name] for name in read if name in producers} | {*step.after}
    names |= {name.removeprefix("steps.") for name in read if name.startswith("steps.")}
    if node.is_ordered:
        before = [other.name for other in node.steps[: node.steps.index(step)] if other.name in live]
        names |= set(before[-1:])
    return names


def _live(node: Node, wanted: Collection[str]) -> tuple[list[int], set[str]]:
    read = {*wanted, *([node.carries] if node.carries else []), *([node.again.name] if node.again else [])}
    live: set[int] = set()
    named = set(node.answer_after)
    while True:
        for index in sorted(live):
            if node.is_ordered:
                named |= {step.name for step in node.steps[:index]}
            named |= set(node.steps[index].after)
            read |= read_by(node.steps[index])
        named |= {name.removeprefix("steps.") for name in read if name.startswith("steps.")}
        for step in node.steps:  # what is named runs as a whole
            if step.name in named:
                read |= {tensor for _, tensor in step.outputs}
        more = {
            index
            for index, step in enumerate(node.steps)
            if step.name in named or read & {tensor for _, tensor in step.outputs}
        }
        if more == live:
            return sorted(live), read
        live = more


def can_stream(step: Step) -> bool:
    """Whether a step, or its fallback, may give more than one response."""
    return any(can_be_decoupled(one.target) for one in step.chain)


def can_be_decoupled(target: Model | Node) -> bool:
    """Whether a target may give more than one response."""
    if isinstance(target, Model):
        return target.streams
    steps: Collection[Step] = target.steps
    if target.piece in ("WHOLE", "SENTENCE"):
        return target.piece == "SENTENCE"
    if target.kind is SequencePlan:
        steps = steps_behind(target, target.outputs)
    return any(map(can_stream, steps)) or (target.kind is EnsemblePlan and target.method is METHODS["MERGE"])


def steps_behind(node: Node, outputs: Collection[str]) -> list[Step]:
    """Steps of a sequence that must have ended before some of its outputs are there."""
    live = [node.steps[index] for index in live_steps(node, outputs)]
    needs = {step.name: waits_for(node, step, {other.name for other in live}) for step in live}
    behind = {step.name for step in live if {tensor for _, tensor in step.outputs}.intersection(outputs)}
    while more := set[str]().union(*(needs[name] for name in behind)) - behind:
        behind |= more
    return [step for step in live if step.name in behind]
