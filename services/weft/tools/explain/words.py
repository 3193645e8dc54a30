"""Why a step runs, or does not, in words."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import takewhile

from weft.language.description import cases_text, condition_text
from weft.language.plan import Condition, NodePlan, StepPlan
from weft.router.steps import ConditionFailedError
from weft.tools.explain.evaluator import Verdict, conditions_in
from weft.tools.explain.paths import Evaluation
from weft.tools.explain.stand_ins import AGAIN
from weft.tools.explain.study import Study

#: What stands before a condition, where that is not the name of its field.
_WORDS = {"sticky_by": "sticky by", "accept": "accepted if", AGAIN: "again while"}


def reasons(step: StepPlan, node: NodePlan, study: Study, limit: float | None) -> list[str]:
    """What decides whether a step runs."""
    description = node.describe()
    tested = study.evaluations(step, "when")
    index = next(index for index, one in enumerate(description.steps) if one is step)
    why = description.notes_to(index)[:1] if any(path.is_drawn for path in study.paths) else []
    has_time = limit is None or limit >= step.min_remaining_ms
    earlier = _answers_before(step, node, study) if has_time and not tested else None
    if earlier is not None and earlier.accept is not None:
        return [f"'{earlier.name}' is accepted"]
    if earlier is not None and (step.is_otherwise or step.cases or step.when):
        return [*why, f"'{earlier.name}' comes first"]
    if isinstance(study.error, ConditionFailedError) and not tested and not any(study.runs(step)):
        return why
    if step.is_otherwise:
        why.append("otherwise")
    if step.cases:
        why.append(f"case {cases_text(step.cases)}")
    if step.when is not None and (verdict := summary(tested)) is not None:
        why.append(verdict_text("when", step.when, verdict))
    rows = _rows_of(step, node, study)
    if why and rows is not None and not why[-1].endswith(("= true", "= false")):
        why[-1] = f"{why[-1].removesuffix(' = ?')}: {rows}"
    if any(custom is step for custom in node.customs):
        why.append("combines")
    return why


def _answers_before(step: StepPlan, node: NodePlan, study: Study) -> StepPlan | None:
    """The last of the steps before one that does not run, if some of these is taken on each path."""
    if study.error is not None or any(study.runs(step)):
        return None
    before = [(one, study.runs(one)) for one in takewhile(lambda one: one is not step, node.steps)]
    is_taken = all(any(runs[number] for _, runs in before) for number in range(len(study.paths)))
    return next((one for one, runs in reversed(before) if any(runs)), None) if is_taken else None


def own_conditions(node: NodePlan) -> Iterator[tuple[str, object, Condition]]:
    """Conditions of a node itself: name of the field, what the field is of, and the condition."""
    for one in fields(node):
        if one.name not in ("steps", "shadows"):
            part = getattr(node, one.name)
            for owner, name, condition in conditions_in(part, node, one.name):
                if owner is node:
                    yield name, part, condition


def summary(evaluations: Sequence[Evaluation]) -> Verdict | None:
    """What was found of a condition, where it is always the same; None where nothing was."""
    found = list(dict.fromkeys(verdict for one in evaluations for verdict in one.verdicts))
    return None if not found else found[0] if len(found) == 1 else Verdict(is_known=False)


def verdict_text(name: str, condition: Condition, verdict: Verdict) -> str:
    """``when inputs.X > 1 = true``; `` = "de"``, `` = ?``."""
    text = f"{_WORDS.get(name, name)} {condition_text(condition)}"
    if verdict.fails:
        return f"{text} fails"
    if not verdict.is_known:
        return f"{text} = ?"
    if condition.is_test:
        return f"{text} = {'true' if verdict.value else 'false'}"
    return f"{text} = {cases_text((str(verdict.value),))}"


def _rows_of(step: StepPlan, node: NodePlan, study: Study) -> str | None:
    """``rows 0, 2-3 of 4``: those that come to a step; None where they are not known, or always go together."""
    if not any(one.rows for path in study.paths for found in path.verdicts.values() for one in found):
        return None
    on = _rows_by_value([one for name, _, _ in own_conditions(node) for one in study.evaluations(node, name)])
    tests = {one.name: _rows_by_value(study.evaluations(one, "when")) for one in node.steps}
    total = max((sum(map(len, found.values())) for found in (on, *tests.values()) if found), default=0)
    if total < 2:
        return None
    gone: set[int] = set()
    for one in sorted(node.steps, key=lambda one: one.is_otherwise):
        rows = set(range(total)) if one.is_otherwise else set()
        rows |= tests[one.name].get(True, set())
        rows |= {row for case in one.cases for row in on.get(case, ())}
        rows -= gone if one.is_otherwise or one.cases else set()
        gone |= rows
        if one is step and (one.is_otherwise or one.cases or tests[one.name]):
            return f"{_ranges(sorted(rows))} of {total}"
    return None


def _rows_by_value(evaluations: Sequence[Evaluation]) -> dict[object, set[int]]:
    """Rows of each value of a condition; nothing where it is not known, or not of rows."""
    rows: dict[object, set[int]] = defaultdict(set)
    for one in evaluations:
        for row, verdict in zip(one.rows, one.verdicts, strict=False):
            if not verdict.is_known:
                return {}
            rows[verdict.value].add(row)
    return rows


def _ranges(rows: Sequence[int]) -> str:
    """``rows 0-2, 5``."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    return f"row{'s' * (len(rows) > 1)} {shown}" if rows else "no row"
