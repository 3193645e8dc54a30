"""How a request goes through a sequence."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from weft_router.graph.description import condition_text, slot_name
from weft_router.graph.plan import CallPlan
from weft_router.graph.pruning import slots_read, steps_behind
from weft_router.kinds.sequence.run import LoopPlan
from weft_tools.explain.choices import StepChoice, verdict_text
from weft_tools.explain.entry import ExplainedStep, Failure, Fate, make_unsure, skipped
from weft_tools.explain.values import Value, joined

if TYPE_CHECKING:
    from weft_tools.explain.walk import Values, Walk


def walk_sequence(
    walk: "Walk", entry: ExplainedStep, node: Any, frame: "Values", limit: float | None, live: Collection[int]
) -> None:
    """The steps ``live`` once, or as often as a loop may go round."""
    first = frame.copy()
    _walk_round(walk, entry, node, frame, limit, live)
    loop = getattr(node, "loop", None)
    if loop is None or loop.max_iterations == 1 or entry.failure is not None:
        return
    verdict = walk.knowledge.judge(loop.again, frame)
    error = f"INVALID_ARGUMENT: {walk.prefix}{node.path}: {verdict.error}"
    text = f"again while {condition_text(loop.again)}{verdict_text(verdict)}"
    if verdict.fails:
        entry.failure = Failure(error, is_final=True)
    if verdict.fails or verdict.value is False:
        entry.decisions.append(text)
        return
    entry.decisions.append(f"{text}: at most {loop.max_iterations} rounds")
    entry.num_rounds = loop.max_iterations
    later = _carried(walk, node, loop, first, frame)
    entry.children = [child for child in entry.children if child.step in node.shadows]
    _walk_round(walk, entry, node, later, limit, live)  # what holds in every round
    if entry.failure is not None:
        entry.may_fail.append(entry.failure.message)
        entry.failure = None
    error = verdict.error or walk.knowledge.judge(loop.again, later).error
    if error:
        entry.may_fail.append(f"INVALID_ARGUMENT: {walk.prefix}{node.path}: {error}")
    frame[:] = [joined(values) for values in zip(frame, later, strict=True)]


def _carried(walk: "Walk", node: Any, loop: LoopPlan, first: "Values", last: "Values") -> "Values":
    """What any round after the first may begin with."""
    later = first.copy()
    for output, target in loop.carry:
        origin = f"{slot_name(node, output)} of the round before"
        value = Value.unknown(node.specs.get(target), walk.num_rows, origin, is_batched=walk.is_batched)
        may_be_absent = first[target].may_be_absent or last[output].may_be_absent
        later[target] = value.maybe() if may_be_absent else value
    return later


def _walk_round(
    walk: "Walk", entry: ExplainedStep, node: Any, frame: "Values", limit: float | None, live: Collection[int]
) -> None:
    """Every step once; the entries are in declared order."""
    entries: dict[int, ExplainedStep] = {}
    failed: int | None = None
    lost: dict[int, str] = {}
    for index in _in_order(node):
        step = node.steps[index]
        if index not in live:
            entries[index] = skipped(step, ["no output asked for needs it"], Fate.PRUNED)
        elif index in lost:
            entries[index] = skipped(step, [f"'{lost[index]}' fails: not reached"])
        elif step.shadow is not None:
            entries[index] = walk.shadow(step, node, frame, limit)
        else:
            entries[index] = walk.tested(step, node, frame, limit, StepChoice(Fate.RUNS))
            if entries[index].failure is not None:
                lost |= dict.fromkeys(_after(node, index), step.name)
                failed = index if failed is None else failed
    if failed is not None:
        entry.failure = entries[failed].failure
        others = [entries[index] for index in entries if failed not in _after(node, index)]
        make_unsure(others, f"whether {node.steps[failed].name} fails first")
    for index, one in entries.items():
        action = node.steps[index].action
        if isinstance(action, CallPlan) and action.signature.is_decoupled and one.fate.can_run:
            steps = enumerate(node.steps)
            _repeat([entries[i] for i, step in steps if index in steps_behind(node, slots_read(step))], one)
    entry.children += [entries[index] for index in range(len(node.steps))]


def _repeat(readers: Collection[ExplainedStep], stream: ExplainedStep) -> None:
    """The readers of a decoupled step run for each of its responses, of which there may be none."""
    for reader in readers:
        reader.stream = stream.name
        reader.why.append(f"for each response of {stream.name}")
    make_unsure(readers, f"the responses of {stream.name} -> {stream.target}")


def _in_order(node: Any) -> list[int]:
    """Steps of a sequence, each after those that it waits for, else as declared."""
    left = list(range(len(node.steps)))
    done: list[int] = []
    while left:
        waiting = {consumer for index in left for consumer in node.steps[index].consumers}
        done.append(next(index for index in left if index not in waiting))
        left.remove(done[-1])
    return done


def _after(node: Any, index: int) -> set[int]:
    """The steps that wait for a step, directly or not."""
    found: set[int] = set()
    waiting = list(node.steps[index].consumers)
    while waiting:
        consumer = waiting.pop()
        if consumer not in found:
            found.add(consumer)
            waiting += node.steps[consumer].consumers
    return found
