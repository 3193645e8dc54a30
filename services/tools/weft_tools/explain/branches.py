"""How a request goes through switches, splitters and ensembles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft_router.graph.description import slot_name
from weft_router.graph.plan import StepPlan
from weft_router.kinds.ensemble.run import CombinePlan
from weft_tools.explain.choices import StepChoice, decide, decide_rows
from weft_tools.explain.entry import ExplainedStep, Failure, Fate, make_unsure, skipped
from weft_tools.explain.values import ABSENT, Value, joined

if TYPE_CHECKING:
    from weft_tools.explain.walk import Values, Walk


def walk_choice(walk: "Walk", entry: ExplainedStep, node: Any, frame: "Values", limit: float | None) -> None:
    """A switch or splitter: one branch, or those that it may be."""
    rows: Sequence[Sequence[int] | None] = [None] * len(node.steps)
    if getattr(node, "per_row", None) and walk.num_rows is not None:
        decision, rows = decide_rows(node, frame, walk.knowledge, walk.prefix, walk.num_rows)
    else:
        decision = decide(node, frame, walk.knowledge, walk.prefix, walk.pins)
    entry.decisions += [*(["each row on its own"] if getattr(node, "per_row", None) else []), *decision.says]
    entry.may_fail += decision.may_fail
    entry.failure = decision.failure
    ends: list[Values] = []
    failures: list[Failure] = []
    for step, choice, some in zip(node.steps, decision.choices, rows, strict=True):
        if choice.fate not in (Fate.RUNS, Fate.MAYBE) or entry.failure is not None:
            entry.children.append(_passed_over(step, choice))
            continue
        view, num_rows = frame.copy(), walk.num_rows
        if some is not None:
            view = [value.vague() if choice.depends_on else value.rows(some) for value in frame]
            walk.num_rows = None if choice.depends_on else len(some)
        run = walk.tested if node.kind == "splitter" else walk.step  # of a switch they are decided
        child = run(step, node, view, limit, choice)
        walk.num_rows = num_rows
        entry.children.append(child)
        if child.failure is None:
            ends.append(view)
        elif choice.fate is Fate.RUNS:
            failures.append(child.failure)
        else:
            child.fate = Fate.MAYBE
            child.may_fail.append(child.failure.message)
            child.failure = None
    if failures:
        entry.failure = failures[0]
        for child in entry.children:  # of several, each with rows of its own, all start, but not all that is in them
            make_unsure(child.children, "whether another branch fails first")
    is_parted = any(some is not None and len(some) < (walk.num_rows or 0) for some in rows)
    for name, slot in node.outputs:
        value = joined(end[slot] for end in ends) if ends else ABSENT
        if is_parted and value.tensor is not None:  # rows of several branches
            origin = f"{name} of {node.name}"
            value = Value.unknown(node.specs.get(slot), walk.num_rows, origin, is_batched=walk.is_batched)
        frame[slot] = value


def walk_ensemble(walk: "Walk", entry: ExplainedStep, node: Any, frame: "Values", limit: float | None) -> None:
    """An ensemble: all members, then what is made of their answers."""
    members = [walk.tested(step, node, frame, limit, StepChoice(Fate.RUNS)) for step in node.steps]
    entry.children += members
    is_race = node.is_race
    if is_race and len(members) > 1:
        entry.decisions.append("the first answer counts, the others are cancelled")
    if node.quorum:
        entry.decisions.append(f"quorum {node.quorum} of {len(members)}")
    if node.straggler_ms:
        entry.decisions.append(f"late ones are waited for {node.straggler_ms} ms")
    entry.failure = _failure(walk, node, members, is_race=is_race)
    if entry.failure is None and sum(member.fate is Fate.RUNS for member in members) < max(node.quorum, 1):
        entry.may_fail.append(f"INVALID_ARGUMENT if fewer than {max(node.quorum, 1)} of {len(members)} steps run")
    for member, step in zip(members, node.steps, strict=True):  # all start, but not all that is in them
        if len(members) > 1 and (is_race or entry.failure is not None or (step.is_soft and node.straggler_ms)):
            make_unsure(member.children, f"whether {member.name} is cancelled before")
    for combine in node.combines:
        entry.decisions.append(_combine_text(node, combine))
        if combine.custom is None:
            _combine(walk, node, combine, frame)
        elif entry.failure is None:
            entry.children.append(_run_custom(walk, node, combine, combine.custom, frame, limit))
            entry.failure = entry.children[-1].failure


def _failure(walk: "Walk", node: Any, members: Sequence[ExplainedStep], *, is_race: bool) -> Failure | None:
    """Why the ensemble fails for certain."""
    failed = next((member.failure for member in members if member.failure is not None), None)
    able = [member for member in members if member.fate in (Fate.RUNS, Fate.MAYBE)]
    if failed is not None and (not is_race or failed.is_final or not able):
        return failed
    needed = max(node.quorum, 1)
    if len(able) >= needed:
        return None
    codes = set()
    fates = []
    for member in (member for member in members if member not in able):
        if member.soft_failure is None:
            fates.append(f"{member.name} did not run, its 'when' is false")
        else:
            code, _, text = member.soft_failure.message.partition(": ")
            codes.add(code)
            fates.append(f"{member.name} failed: {code}: {text.removeprefix(walk.prefix)}")
    code = "INVALID_ARGUMENT" if not codes else codes.pop() if len(codes) == 1 else "UNAVAILABLE"
    message = f"{needed} of {len(members)} steps must answer, and cannot any more: {'; '.join(fates)}"
    return Failure(f"{code}: {walk.prefix}{node.path}: {message}")


def _combine(walk: "Walk", node: Any, combine: CombinePlan, frame: "Values") -> None:
    values = [frame[slot] for _, slot in combine.sources]
    present = [value for value in values if value.tensor is not None]
    if combine.method.is_keyed or combine.method.is_first or not present:
        value = joined(present) if present else ABSENT
    else:
        origin = f"{slot_name(node, combine.output)} by {combine.method.name} of {node.name}"
        is_batched = walk.is_batched
        value = Value.unknown(node.specs.get(combine.output), walk.num_rows, origin, is_batched=is_batched)
    is_unsure = bool(present) and all(value.may_be_absent for value in values)
    frame[combine.output] = value.maybe() if is_unsure else value


def _run_custom(
    walk: "Walk", node: Any, combine: CombinePlan, step: StepPlan, frame: "Values", limit: float | None
) -> ExplainedStep:
    """The model that combines; it is called if there is anything to combine."""
    values = [frame[slot] for _, slot in combine.sources]
    if all(value.tensor is None for value in values):
        walk.skip(step, frame)
        return skipped(step, ["no answer has what it combines"])
    if len(values) == len(node.steps) or not all(value.may_be_absent for value in values):
        return walk.step(step, node, frame, limit, StepChoice(Fate.RUNS, ["combines"]))
    return walk.step(step, node, frame, limit, StepChoice(Fate.MAYBE, ["combines"], ["which members answer"]))


def _combine_text(node: Any, combine: CombinePlan) -> str:
    names = ", ".join(node.steps[index].name for index, _ in combine.sources)
    weighted = ", weighted" if combine.is_weighted else ""
    return f"{slot_name(node, combine.output)} = {combine.method.name} of {names}{weighted}"


def _passed_over(step: StepPlan, choice: StepChoice) -> ExplainedStep:
    return skipped(step, choice.why, Fate.FAILS if choice.fate is Fate.FAILS else Fate.SKIPPED)
