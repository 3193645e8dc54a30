"""How a request goes through a cascade."""

from typing import TYPE_CHECKING, Any

from weft_router.graph.description import condition_text, counted
from weft_router.graph.plan import Condition, StepPlan
from weft_router.kinds.cascade.run import no_answer
from weft_tools.explain.choices import StepChoice, verdict_text
from weft_tools.explain.entry import ExplainedStep, Failure, Fate, skipped
from weft_tools.explain.judge import Verdict
from weft_tools.explain.values import ABSENT, Value, joined

if TYPE_CHECKING:
    from weft_tools.explain.walk import Values, Walk


class CascadeWalk:
    """Goes from step to step until an answer is certain to be accepted.

    Args:
        walk: The request.
        entry: Of the node.
        node: The cascade.
        frame: Of the node.
        limit: Milliseconds; None without limit.
    """

    def __init__(self, walk: "Walk", entry: ExplainedStep, node: Any, frame: "Values", limit: float | None) -> None:
        self._walk = walk
        self._entry = entry
        self._node = node
        self._frame = frame
        self._limit = limit
        self._goes_by_row = getattr(node, "per_row", None) and walk.num_rows != 1
        self._ends: list[Values] = []
        self._stop = ""
        self._open: list[str] = []
        self._is_late = False
        self._has_answer = False
        self._soft_failure: Failure | None = None

    def run(self) -> None:
        """Fill the entry's children and the node's outputs; ``entry.failure`` is set if the node fails."""
        node, entry, walk = self._node, self._entry, self._walk
        if getattr(node, "per_row", None):
            entry.decisions.append("each row on its own: only rows that are not accepted go on")
        for index, step in enumerate(node.steps):
            if self._stop:
                entry.children.append(skipped(step, [self._stop]))
                continue
            choice, rows = self._choice(step, is_first=index == 0)
            if choice.fate not in (Fate.RUNS, Fate.MAYBE):
                entry.children.append(skipped(step, choice.why, choice.fate))
                continue
            is_sure, num_ends = choice.fate is Fate.RUNS and rows is None, len(self._ends)
            if self._open:
                choice.fate, choice.depends_on = Fate.MAYBE, list(dict.fromkeys(self._open + choice.depends_on))
            self._try(step, choice, rows, is_last=index == len(node.steps) - 1)
            if is_sure and len(self._ends) > num_ends:  # it answers, unless an answer before it is accepted
                self._has_answer = True
        if not self._ends and entry.failure is None:
            error = no_answer(node, is_late=self._is_late)
            nobody = Failure(f"{error.code}: {walk.prefix}{node.path}: {error.message}")
            entry.failure = self._soft_failure or nobody
        elif not self._has_answer and entry.failure is None:
            entry.may_fail.append("INVALID_ARGUMENT, or DEADLINE_EXCEEDED, if no step runs")
        for name, slot in node.outputs:
            value = joined(end[slot] for end in self._ends) if self._ends else ABSENT
            if self._goes_by_row and value.tensor is not None:  # rows of several steps
                origin = f"{name} of {node.name}"
                whole = Value.unknown(node.specs.get(slot), walk.num_rows, origin, is_batched=walk.is_batched)
                value = whole.maybe() if value.may_be_absent else whole
            self._frame[slot] = value

    def _choice(self, step: StepPlan, *, is_first: bool) -> tuple[StepChoice, list[int] | None]:
        """Whether a step that is reached runs, and with which rows; None where that is not known, or with all."""
        choice = StepChoice(Fate.RUNS)
        rows: list[int] | None = None
        if step.when is not None:
            verdict, rows = self._test(step.when, self._frame)
            choice.why.append(f"when {condition_text(step.when)}{verdict_text(verdict) if rows is None else ''}")
            if rows is not None:
                choice.why.append(f"{counted(len(rows), 'row')} of {self._walk.num_rows}: {', '.join(map(str, rows))}")
            self._note_error(verdict)
            if verdict.fails:
                self._stop = f"'when' of '{step.name}' fails"
                choice.fate = Fate.FAILS
            elif verdict.value is False:
                choice.fate = Fate.SKIPPED
            elif not verdict.is_known and rows is None:
                choice.fate = Fate.MAYBE
                choice.depends_on += verdict.depends_on
        needs = step.min_remaining_ms
        if needs and self._limit is not None and choice.fate in (Fate.RUNS, Fate.MAYBE):
            if self._limit < needs:
                choice.fate, self._is_late = Fate.SKIPPED, True
                choice.why.append(f"at most {self._limit:g} ms are left, it needs {needs}")
            elif not is_first:
                choice.fate = Fate.MAYBE
                choice.depends_on.append(f"whether {needs} ms are left")
        return choice, rows

    def _test(self, condition: Condition, frame: "Values") -> tuple[Verdict, list[int] | None]:
        """A test; where it is known that only some rows pass it, those rows."""
        walk, knowledge = self._walk, self._walk.knowledge
        if not self._goes_by_row or walk.num_rows is None:
            return knowledge.judge(condition, frame), None
        rows = range(walk.num_rows)
        verdicts = [knowledge.judge(condition, self._of_rows([row], frame)) for row in rows]
        first = verdicts[0]
        if all((one.value, one.is_known, one.error) == (first.value, first.is_known, first.error) for one in verdicts):
            return first, None
        failing = next((verdict for verdict in verdicts if verdict.fails), None)
        if failing is not None:
            return failing, None
        origins = dict.fromkeys(origin for verdict in verdicts for origin in verdict.depends_on)
        mixed = Verdict(is_known=False, depends_on=(*origins, "the row"))
        are_known = all(verdict.is_known for verdict in verdicts)
        return mixed, [row for row in rows if verdicts[row].value is True] if are_known else None

    def _of_rows(self, rows: list[int] | None, frame: "Values") -> "Values":
        """The frame with those rows of its tensors; with None nobody knows which."""
        view = frame.copy()
        flags = {step.ok_slot for step in self._node.steps}
        for slot, value in enumerate(frame):
            if slot not in flags:
                view[slot] = value.vague() if rows is None else value.rows(rows)
        return view

    def _try(self, step: StepPlan, choice: StepChoice, rows: list[int] | None, *, is_last: bool) -> None:
        """Run a step and look at its answer."""
        walk, num_rows = self._walk, self._walk.num_rows
        view = self._frame.copy()
        is_certain = choice.fate is Fate.RUNS
        is_whole = is_certain and rows is None
        if self._goes_by_row and not is_whole:
            rows = rows if is_certain else None
            view = self._of_rows(rows, view)
            walk.num_rows = None if rows is None else len(rows)
        child = walk.step(step, self._node, view, self._limit, choice)
        self._entry.children.append(child)
        failure = child.failure or child.soft_failure
        if failure is None:
            self._look_at(step, child, view, is_certain=is_certain, is_whole=is_whole, is_last=is_last)
        elif not is_certain:
            child.fate, child.failure = Fate.MAYBE, None
            child.may_fail.append(failure.message)
        elif child.failure is not None:
            self._entry.failure, self._stop = child.failure, f"'{step.name}' fails"
        else:
            self._soft_failure = failure
        walk.num_rows = num_rows

    def _look_at(
        self, step: StepPlan, child: ExplainedStep, view: "Values", *, is_certain: bool, is_whole: bool, is_last: bool
    ) -> None:
        """The answer of a step is accepted, or may be; ``is_whole``: it is certain, and for all rows."""
        for _, slot in step.outputs:  # what follows looks at an answer only
            view[slot] = view[slot].present()
        self._ends.append(view)
        if step.ok_slot >= 0:
            self._frame[step.ok_slot] = view[step.ok_slot] if is_whole else view[step.ok_slot].maybe()
        verdict = Verdict(True)
        if step.accept is not None and not is_last:
            verdict, _ = self._test(step.accept, view)
            child.decisions.append(f"accepted if {condition_text(step.accept)}{verdict_text(verdict)}")
            self._note_error(verdict, is_certain=is_certain)
            if verdict.fails and is_certain:
                self._stop = f"'accept' of '{step.name}' fails"
        if not verdict.is_known or verdict.error:
            self._open += verdict.depends_on or [f"the answer of {step.name}"]
        elif verdict.value is True and is_whole and not step.is_soft:
            self._stop = f"'{step.name}' is accepted"
        elif verdict.value is True:
            self._open += child.depends_on or [f"whether {step.name} fails" if is_whole else "the row"]

    def _note_error(self, verdict: Verdict, *, is_certain: bool = True) -> None:
        """A condition cannot be evaluated, for certain or perhaps."""
        message = f"INVALID_ARGUMENT: {self._walk.prefix}{self._node.path}: {verdict.error}"
        if verdict.fails and is_certain and not self._open:
            self._entry.failure = Failure(message, is_final=True)
        elif verdict.error:
            self._entry.may_fail.append(message)
