"""Builds the tree of explained steps from the studies of nodes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import takewhile

from weft.base.errors import WeftError
from weft.language.description import cases_text, condition_text, limit_texts
from weft.language.plan import Condition, GraphPlan, NodePlan, StepPlan
from weft.router.reporting.path import StepRecord
from weft.router.requests import ROUTE_HEADER
from weft.router.steps.action import ConditionFailedError
from weft.tools.explain.evaluator import Unknown, Verdict, conditions_in
from weft.tools.explain.paths import LATE, MAX_PATHS, ORDER, STREAM, Evaluation
from weft.tools.explain.question import Question, least
from weft.tools.explain.render import ExplainedStep, LeftOut, StepOutcome, make_unsure
from weft.tools.explain.stand_ins import AGAIN
from weft.tools.explain.study import Studies, Study

#: What stands before a condition, where that is not the name of its field.
_WORDS = {"sticky_by": "sticky by", "accept": "accepted if", AGAIN: "again while"}


def _reasons(step: StepPlan, node: NodePlan, study: Study, limit: float | None) -> list[str]:
    """The decisions on whether a step runs."""
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
    if step.when is not None and (verdict := _summary(tested)) is not None:
        why.append(_verdict_text("when", step.when, verdict))
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


def _own_conditions(node: NodePlan) -> Iterator[tuple[str, object, Condition]]:
    """Conditions of a node itself: name of the field, what the field is of, and the condition."""
    for one in fields(node):
        if one.name not in ("steps", "shadows"):
            part = getattr(node, one.name)
            for owner, name, condition in conditions_in(part, node, one.name):
                if owner is node:
                    yield name, part, condition


def _summary(evaluations: Sequence[Evaluation]) -> Verdict | None:
    """The finding for a condition if it is always the same; None without one."""
    found = list(dict.fromkeys(verdict for one in evaluations for verdict in one.verdicts))
    return None if not found else found[0] if len(found) == 1 else Verdict(is_known=False)


def _verdict_text(name: str, condition: Condition, verdict: Verdict) -> str:
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
    on = _rows_by_value([one for name, _, _ in _own_conditions(node) for one in study.evaluations(node, name)])
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
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    return f"row{'s' * (len(rows) > 1)} {shown}" if rows else "no row"


def explain(plan: GraphPlan, question: Question) -> ExplainedStep:
    """Explain a request; return the root's entry."""
    root = plan.root
    limit = question.evaluator.remaining_ms
    label = f"{plan.signature.name}/{plan.signature.version}"
    entry = ExplainedStep(root.name, root.path, label, root.kind, deadline_ms=limit, node=root)
    entry.notes = limit_texts(0, plan.max_inflight)
    if plan.signature.is_decoupled:
        entry.decisions.append("answers with a stream of responses")
    if plan.cache is not None:
        entry.notes.append(f"whole answers: {plan.cache.text()}")
    studies = Studies(plan, question)
    try:
        study = studies.root(limit)
        _Tree(plan, question, studies).fill(entry, root, study, limit)
    finally:
        studies.close()
    if entry.failure:
        entry.outcome = StepOutcome.FAILS
    else:
        entry.left_out = list(_left_out(plan, question, study))
    return entry


def _left_out(plan: GraphPlan, question: Question, study: Study) -> Iterator[LeftOut]:
    """Requested optional outputs that the answer lacks or may lack."""
    slots = dict(plan.root.outputs)
    for spec in plan.signature.outputs:
        if not spec.is_optional or (question.outputs and spec.name not in question.outputs):
            continue
        given = [path.frame[slots[spec.name]] for path in study.paths]
        lacks = [tensor is None for tensor in given]
        ended = [number for number, path in enumerate(study.paths) if path.error is None and not path.is_empty]
        is_clear = not study.is_cut and not any(study.paths[number].is_unclear for number in ended)
        found = {lacks[number] for number in ended}
        unsure = [one.known.origins for one in given if isinstance(one, Unknown) and one.known.may_be_absent]
        if found == {True} and is_clear:
            yield LeftOut(spec.name)
        elif True in found or unsure or not is_clear:
            origins = [*(one.origins for one in study.deciding(lacks)), *unsure]
            some = dict.fromkeys(origin for ones in origins for origin in ones)
            yield LeftOut(spec.name, tuple(some) or ("which way it goes",))


def _may_fail(entry: ExplainedStep) -> Iterator[str]:
    """Possible errors of a step and of all in it."""
    yield from entry.may_fail
    for child in entry.children:
        yield from _may_fail(child)


class _Tree:
    def __init__(self, plan: GraphPlan, question: Question, studies: Studies) -> None:
        self._root = plan.root
        self._question = question
        self._studies = studies
        self._prefix = plan.error_prefix

    def fill(self, entry: ExplainedStep, node: NodePlan, study: Study, limit: float | None) -> None:
        if study.error is not None:
            entry.failure = _message(study.error)
        entry.may_fail += dict.fromkeys(map(_message, study.possible_errors))
        shown = [*node.shadows, *node.steps, *node.customs]
        children = {step.name: self._child(step, node, study, limit) for step in shown}
        entry.children += children.values()
        below = {text for child in entry.children for text in _may_fail(child)}
        entry.may_fail = [text for text in entry.may_fail if text not in below]
        self._say(entry, node, study)
        failed = next((child.name for child in entry.children if child.failure), "")
        for child in entry.children:
            if child.outcome is StepOutcome.SKIPPED and not child.why and failed:
                child.why.append(f"'{failed}' fails: not reached")
        for name in sorted({name for path in study.counted for name in path.cancelled} & set(children)):
            child = children[name]
            if study.error is None:
                make_unsure(child.children, f"whether {name} is cancelled before")
            else:
                make_unsure(child.children or [child], f"whether {failed or node.name} fails first")
        if study.is_cut:
            make_unsure(entry.children, "which way it goes")
            entry.decisions.append(f"there are more than {MAX_PATHS} ways to go; not all were followed")
        self._count(entry, study)

    def _child(self, step: StepPlan, node: NodePlan, study: Study, limit: float | None) -> ExplainedStep:
        why = _reasons(step, node, study, limit)
        if step.shadow is None:
            return self._step(step, node, study, study.runs(step), limit, why)
        has_run = [any(call.step is step for call in path.calls) for path in study.paths]
        why.insert(0, step.shadow.text())
        if not any(has_run):
            return ExplainedStep.of(step, StepOutcome.SKIPPED, why)
        entry = ExplainedStep.of(step, StepOutcome.SHADOW, why).noted(node)
        entry.depends_on = _origins(study, step, has_run)
        self._inside(entry, step, study, least(step.timeout_ms))
        return entry

    def _step(
        self,
        step: StepPlan,
        node: NodePlan,
        study: Study,
        runs: list[list[StepRecord]],
        limit: float | None,
        why: list[str],
        *,
        is_fallback: bool = False,
    ) -> ExplainedStep:
        has_run = [bool(records) for records in runs]
        plain = [
            records[-1] for path, records in zip(study.paths, runs, strict=True) if records and not path.has_trouble
        ]
        if not any(has_run) and not is_fallback:
            return self._skipped(step, node, study, why, limit)
        entry = ExplainedStep.of(step, StepOutcome.RUNS, why).noted(node)
        entry.deadline_ms = least(limit, step.timeout_ms)
        if is_fallback and not plain:
            entry.outcome = StepOutcome.ON_ERROR
        elif not study.is_certain(has_run):
            entry.outcome = StepOutcome.MAYBE
            entry.depends_on = _origins(study, step, has_run)
            stream = next((one.step for one in study.deciding(has_run) if one.cause == STREAM and one.step), None)
            if stream is not None:
                entry.stream = stream.name
                entry.why.append(f"for each response of {stream.name}")
        accepts = _summary(study.evaluations(step, "accept"))
        if step.accept is not None and accepts is not None:
            entry.decisions.append(_verdict_text("accept", step.accept, accepts))
        self._inside(entry, step, study, entry.deadline_ms)
        if plain and all(record.status not in ("OK", "CANCELLED") for record in plain):
            self._fail(entry, step, study, plain[-1])
        if step.fallback is not None:
            below = [[one for record in records for one in _tried(record, step.fallback)] for records in runs]
            entry.children.append(self._step(step.fallback, node, study, below, limit, [], is_fallback=True))
        return entry

    def _inside(self, entry: ExplainedStep, step: StepPlan, study: Study, limit: float | None) -> None:
        if isinstance(step.action, NodePlan):
            entry.node = step.action
            entry.deadline_ms = least(limit, step.action.timeout_ms)
            if study.calls(step):
                self.fill(entry, step.action, self._studies.inside(step, study), entry.deadline_ms)
                entry.failure = ""

    def _fail(self, entry: ExplainedStep, step: StepPlan, study: Study, record: StepRecord) -> None:
        """Record that a step is certain to fail; ``record`` is of one run."""
        error = next((call.error for call in study.calls(step) if call.error is not None), study.error)
        message = f"{record.status}: {record.error}" if record.error else _message(error) if error else record.status
        if record.has_answered:
            entry.why.append(message)
        elif record.is_missing:
            entry.why.append(f"{message}; the request goes on without it")
            entry.outcome = StepOutcome.FAILS
        elif entry.outcome is StepOutcome.RUNS:
            entry.outcome, entry.failure = StepOutcome.FAILS, message
        else:
            entry.may_fail.append(message)

    def _skipped(
        self, step: StepPlan, node: NodePlan, study: Study, why: list[str], limit: float | None
    ) -> ExplainedStep:
        verdict = _summary(study.evaluations(step, "when"))
        if verdict is not None and verdict.fails:
            entry = ExplainedStep.of(step, StepOutcome.FAILS, why)
            entry.failure = _message(study.error) if study.error else verdict.error
            return entry
        if study.is_cut and verdict is None:
            return ExplainedStep.of(step, StepOutcome.MAYBE).noted(node)
        if node is self._root and step.name in self._studies.pruned:
            return ExplainedStep.of(step, StepOutcome.PRUNED, ["no output asked for needs it"])
        if limit is not None and limit < step.min_remaining_ms and (verdict is None or verdict.value is True):
            why = [*why, f"at most {limit:g} ms are left, it needs {step.min_remaining_ms}"]
        return ExplainedStep.of(step, StepOutcome.SKIPPED, why)

    def _say(self, entry: ExplainedStep, node: NodePlan, study: Study) -> None:
        description, names = node.describe(), [step.name for step in node.steps]
        pinned = self._question.pins.get(node.name)
        is_drawn = any(path.is_drawn for path in study.paths)
        shares = (
            ", ".join(" ".join([*description.notes_to(index)[:1], name]) for index, name in enumerate(names))
            if is_drawn
            else ""
        )
        if any(one.rows for path in study.paths for found in path.verdicts.values() for one in found):
            entry.decisions.append("each row on its own")
        for name, holder, condition in _own_conditions(node):
            verdict = _summary(study.evaluations(node, name))
            if verdict is None:
                continue
            text = _verdict_text(name, condition, verdict)
            if name == AGAIN and not verdict.fails and verdict.value is not False:
                entry.num_rounds = getattr(holder, "max_iterations", 1)
                text += f": {', '.join(description.notes)}"
            elif name == "sticky_by" and verdict.value is not None:
                taken = next((child.name for child in entry.children if child.outcome is StepOutcome.RUNS), "")
                text += ": no key" if is_drawn else f": {taken}" if taken else ""
            entry.decisions.append(text)
        if pinned in names:
            entry.decisions.append(
                f"pinned by header {ROUTE_HEADER}, if the router runs with --allow-route-header: {pinned}"
            )
        if is_drawn and node.bandit is not None:
            entry.decisions.append(f"{node.bandit.algorithm.name} on feedback; before it: {shares}")
        elif is_drawn:
            entry.decisions.append(f"random: {shares}")
        if description.each:
            entry.each = description.each
            entry.decisions.append(f"{description.entry.title}: {'; '.join(description.entry.notes)}")
        entry.decisions += description.exit.notes
        for found in (one for path in study.paths for ones in path.verdicts.values() for one in ones):
            for verdict in found.verdicts:
                text = f"INVALID_ARGUMENT: {self._prefix}{node.path}: {verdict.error}"
                if verdict.error and not verdict.is_known and text not in entry.may_fail:
                    entry.may_fail.append(text)

    def _count(self, entry: ExplainedStep, study: Study) -> None:
        """Which steps inside call something on the same path."""
        places = {id(child.step): place for place, child in enumerate(entry.children)}
        together: dict[tuple[bool, frozenset[int]], None] = {}
        for path in study.paths:
            called = [places.get(id(call.step)) for call in path.calls]
            for start, end in zip([0, *path.rounds], [*path.rounds, len(called)], strict=True):
                together[path.has_trouble, frozenset(place for place in called[start:end] if place is not None)] = None
        if any(path.is_vague for path in study.paths):  # rows of one request may take several of these paths
            together = {(False, frozenset().union(*(places for _, places in together))): None}
        entry.together = list(together)


def _message(error: WeftError) -> str:
    return f"{error.code}: {error.message}"


def _tried(record: StepRecord, fallback: StepPlan) -> list[StepRecord]:
    return [] if record.fallbacks is None else [one for one in record.fallbacks.steps if one.name == fallback.name]


def _origins(study: Study, step: StepPlan, holds: Sequence[bool]) -> list[str]:
    """Sources that a fact about a step depends on."""
    decisions = study.deciding(holds)
    found = [origin for one in decisions if one.cause not in (LATE, ORDER) for origin in one.origins]
    for one in decisions:
        if one.cause == LATE and step.min_remaining_ms:
            found.append(f"whether {step.min_remaining_ms} ms are left")
        elif one.cause in (LATE, ORDER) and study.error is None:
            found += one.origins
    return list(dict.fromkeys(found))
