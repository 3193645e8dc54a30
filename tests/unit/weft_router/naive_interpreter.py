"""What a random graph answers, worked out one step at a time.

Written from the description of the language alone; it shares no code with the executor. Nothing runs at once here: a
step is told when it starts and tells when it ends, and who came first is looked up afterwards. A tensor is a list of
its rows.
"""

from collections.abc import Iterator, Mapping, Sequence

from tests.unit.weft_router.naive_values import (
    COMBINED,
    LATE,
    NEVER,
    AmbiguousError,
    Ends,
    FailsError,
    Rows,
    Values,
    default,
    earliest,
    first_bytes,
    holds,
    race,
    some,
)
from tests.unit.weft_router.random_graphs import WIDTH, Model, Node, Step

from weft_router.combine import METHODS
from weft_router.kinds.ensemble import EnsemblePlan
from weft_router.kinds.sequence import SequencePlan
from weft_router.kinds.splitter import SplitterPlan
from weft_router.kinds.switch import SwitchPlan


class Interpreter:
    """Runs graphs.

    Args:
        deadline: Of the request, in ns.
    """

    def __init__(self, deadline: int = NEVER) -> None:
        self.deadline = deadline
        self.kept: dict[tuple[Step, str], Ends] = {}

    def node(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        """Run a node from time `at` on. Raises FailsError."""
        end = NEVER
        try:
            ends = self.run(node, values, at, deadline)
            end = ends.at
            return ends
        except FailsError as failure:
            end = failure.at
            raise
        finally:  # what was cancelled then has kept nothing
            steps = set(steps_within(node))
            self.kept = {key: kept for key, kept in self.kept.items() if kept.at <= end or key[0] not in steps}

    def run(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        if node.kind is SequencePlan:
            return self.sequence(node, values, at, deadline)
        if node.kind is EnsemblePlan:
            return self.ensemble(node, values, at, deadline)
        if node.kind is SplitterPlan:
            return self.step(node.steps[-1], values, at, deadline)
        run = self.switch if node.kind is SwitchPlan else self.cascade
        if not node.per_row:
            return run(node, values, at, deadline)
        return (self.switch_rows if node.kind is SwitchPlan else self.cascade_rows)(node, values, at, deadline)

    def step(self, step: Step, values: Values, at: int, deadline: int, *, looks_at_when: bool = True) -> Ends:
        """Run a step. Raises FailsError if it is not soft."""
        if looks_at_when and step.when is not None and not holds(step.when, values):
            return Ends(at, default(step, values), has_answered=False)
        try:
            limit = min(deadline, at + step.timeout_ms * 1_000_000) if step.timeout_ms else deadline
            ends = self.cached(step, values, at, limit)
        except FailsError as failure:
            last = failure
            if step.fallback is not None and failure.at < deadline:
                try:
                    return self.step(step.fallback, values, failure.at, deadline)
                except FailsError as other:
                    last = other
            if not step.is_soft or (last.code == LATE and last.at >= self.deadline):
                raise last from None
            return Ends(last.at, default(step, values), has_answered=False, code=last.code)
        return Ends(ends.at, ends.output)

    def cached(self, step: Step, values: Values, at: int, deadline: int) -> Ends:
        """As `tried`, but for inputs that the step has answered before."""
        if not step.is_cached:
            return self.tried(step, values, at, deadline)
        inputs = {name: values[name] for name in ("X", *step.reads)}
        key = (step, repr(inputs))
        if key not in self.kept:
            self.kept[key] = self.tried(step, values, at, deadline)
            return self.kept[key]
        return Ends(at, self.kept[key].output)

    def tried(self, step: Step, values: Values, at: int, deadline: int) -> Ends:
        """As `hedged`, until it succeeds or no further attempt is allowed."""
        number = 1
        while True:
            try:
                return self.hedged(step, values, at, deadline)
            except FailsError as failure:
                retry = step.retry
                if retry is None or failure.code not in retry.codes or number == retry.attempts:
                    raise
                at = failure.at + retry.backoff_ms * 1_000_000 * 2 ** (number - 1)
                if at >= deadline:
                    raise
                number += 1

    def hedged(self, step: Step, values: Values, at: int, deadline: int) -> Ends:
        """As `target`, started again and again until one answers or all have failed."""
        if step.hedge is None:
            return self.target(step, values, at, deadline)
        outcomes: list[Ends | FailsError] = []
        for number in range(step.hedge.max_extra + 1):
            try:
                outcomes.append(self.target(step, values, at, deadline))
            except FailsError as failure:
                outcomes.append(failure)
            at = at + step.hedge.after_ms * 1_000_000 if number < step.hedge.max_extra else NEVER
            answers = sorted(outcome.at for outcome in outcomes if isinstance(outcome, Ends))
            if any(outcome.at == at for outcome in outcomes) or len(set(answers)) < len(answers):
                raise AmbiguousError
            if (answers and answers[0] < at) or all(outcome.at < at for outcome in outcomes):
                break
        for outcome in outcomes:
            if isinstance(outcome, Ends) and outcome.at == answers[0]:
                return outcome
        raise FailsError(max(outcome.at for outcome in outcomes), next(o.code for o in outcomes))

    def target(self, step: Step, values: Values, at: int, deadline: int) -> Ends:
        if isinstance(step.target, Node):
            inner: Values = {"X": values["X"], "E": values[step.reads[0]] if step.reads else None}
            return self.node(step.target, inner, at, deadline)
        return call(step.target, {name: values[name] for name in ("X", *step.reads)}, at, deadline)

    def sequence(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        inputs = dict(values)
        for left in range(max(node.max_iterations, 1) - 1, -1, -1):
            values, at = self.round(node, dict(inputs), at, deadline)
            if node.again is None or not left or not holds(node.again, values):
                break
            if node.carries:
                inputs["X"] = values["t0"]
        return Ends(at, values[f"t{len(node.steps) - 1}"])

    def round(self, node: Node, values: Values, at: int, deadline: int) -> tuple[Values, int]:
        """All tensors of a sequence, and when its last step has ended."""
        ends: dict[str, int] = {}
        failures: list[FailsError] = []
        for index, step in enumerate(node.steps):
            needed = {*step.reads, *([step.when.name] if step.when else [])}
            needed = {name.removesuffix(".ok").replace("steps.s", "t") for name in needed if name not in ("X", "E")}
            if not needed <= set(ends):
                continue  # a step before it failed
            try:
                end = self.step(step, values, max([at, *(ends[name] for name in needed)]), deadline)
            except FailsError as failure:
                failures.append(failure)
                continue
            values[f"t{index}"] = end.output
            values[f"steps.s{index}.ok"] = [b""] if end.has_answered else None
            ends[f"t{index}"] = end.at
        if failures:
            raise earliest(failures)
        return values, max(ends.values())

    def switch(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        return self.step(self.branch(node, values, at), values, at, deadline, looks_at_when=False)

    def branch(self, node: Node, values: Values, at: int) -> Step:
        on = str(first_bytes(values["X"]) % 3)
        for step in node.steps:
            if step.value == on or (step.when is not None and holds(step.when, values)):
                return step
        for step in node.steps:
            if step.is_otherwise:
                return step
        raise FailsError(at, "INVALID_ARGUMENT")

    def switch_rows(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        num_rows = len(values["X"] or [])
        chosen = [self.branch(node, some(values, [row]), at) for row in range(num_rows)]
        ended: list[tuple[list[int], Ends]] = []
        failures: list[FailsError] = []
        for step in node.steps:
            rows = [row for row in range(num_rows) if chosen[row] is step]
            if rows:
                try:
                    part = some(values, rows)
                    ended.append((rows, self.step(step, part, at, deadline, looks_at_when=False)))
                except FailsError as failure:
                    failures.append(failure)
        if failures:
            raise earliest(failures)
        whole: list[bytes] | None = [b""] * num_rows
        for rows, ends in ended:
            if ends.output is None or whole is None:
                whole = None
            else:
                for row, value in zip(rows, ends.output, strict=True):
                    whole[row] = value
        return Ends(max(ends.at for _, ends in ended), whole)

    def cascade(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        latest: Ends | None = None
        reason = FailsError(at, "INVALID_ARGUMENT")
        has_failed = False
        values = dict(values)
        for step in node.steps:
            values[f"steps.{step.name}.ok"] = None
            ends = None
            if step.when is not None and not holds(step.when, values):
                pass
            elif deadline != NEVER and deadline - at < step.min_remaining_ms * 1_000_000:
                if not has_failed:
                    reason = FailsError(at, LATE)
            else:
                try:
                    ends = self.step(step, values, at, deadline, looks_at_when=False)
                except FailsError as failure:
                    if step.is_soft and latest is not None and failure.code == LATE:
                        return Ends(failure.at, latest.output)
                    raise
                at = ends.at
                if ends.code:
                    has_failed, reason = True, FailsError(at, ends.code)
            if ends is not None and ends.has_answered:
                values[f"steps.{step.name}.ok"] = [b""]
                latest = ends
                if step.accept is None or holds(step.accept, {"Y": ends.output}):
                    return Ends(at, ends.output)
        if latest is None:
            raise FailsError(at, reason.code)
        return Ends(at, latest.output)

    def cascade_rows(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        """As `cascade` for each row; rows that reach a step travel together."""
        num_rows = len(values["X"] or [])
        answers: dict[int, Rows] = {}
        reasons = ["INVALID_ARGUMENT"] * num_rows
        has_failed = [False] * num_rows
        oks: list[Values] = [{} for _ in range(num_rows)]
        waiting = list(range(num_rows))
        for step in node.steps:
            if not waiting:
                break
            ok = f"steps.{step.name}.ok"
            for row in waiting:
                oks[row][ok] = None
            rows = [r for r in waiting if step.when is None or holds(step.when, some(values, [r]) | oks[r])]
            if rows and deadline != NEVER and deadline - at < step.min_remaining_ms * 1_000_000:
                for row in rows:
                    reasons[row] = reasons[row] if has_failed[row] else LATE
                rows = []
            output: Rows = None
            has_answered = False
            if rows:
                try:
                    ends = self.step(step, some(values, rows), at, deadline, looks_at_when=False)
                except FailsError as failure:
                    if step.is_soft and failure.code == LATE and all(row in answers for row in waiting):
                        at = failure.at
                        break
                    raise
                at, has_answered, output = ends.at, ends.has_answered, ends.output
                if ends.code:
                    for row in rows:
                        has_failed[row], reasons[row] = True, ends.code
            for row in rows if has_answered else ():
                answers[row] = None if output is None else [output[rows.index(row)]]
                oks[row][ok] = [b""]
                if step.accept is None or holds(step.accept, {"Y": answers[row]}):
                    waiting.remove(row)
        for row in range(num_rows):
            if row not in answers:
                raise FailsError(at, reasons[row])
        whole = [value[0] for _, value in sorted(answers.items()) if value is not None]
        return Ends(at, whole if len(whole) == num_rows else None)

    def ensemble(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        outcomes: list[Ends | FailsError] = []
        for step in node.steps:
            try:
                outcomes.append(self.step(step, values, at, deadline))
            except FailsError as failure:
                outcomes.append(failure)
        if node.method is METHODS["FIRST"] and node.quorum <= 1 and len(node.steps) > 1:
            return race(outcomes)
        at, order = self.members(node, outcomes)
        outputs: list[Rows] = []
        for index, step in enumerate(node.steps):
            one = outcomes[index]
            outputs.append(one.output if index in order and isinstance(one, Ends) else default(step, values))
        present = [output for output in outputs if output is not None]
        if node.method is METHODS["FIRST"]:
            first = [outputs[index] for index in order if outputs[index] is not None]
            return Ends(at, [*first, *present][0] if present else None)
        if not present:
            return Ends(at, None)
        if node.custom is None:
            return Ends(at, COMBINED[node.method](present))
        num_rows = len(present[0])
        stack = [b"".join(bytes(WIDTH) if o is None else o[row] for o in outputs) for row in range(num_rows)]
        mask = bytes(output is not None for output in outputs)
        return call(node.custom, {"S": stack, "MASK": [mask] * num_rows}, at, deadline)

    def members(self, node: Node, outcomes: Sequence[Ends | FailsError]) -> tuple[int, list[int]]:
        """When the waiting is over, and who has answered by then, in that order. Raises FailsError."""
        needed = max(node.quorum, 1)
        order: list[int] = []
        running = set(range(len(outcomes)))
        cutoff = NEVER
        events = sorted((outcome.at, index) for index, outcome in enumerate(outcomes))
        for position, (at, index) in enumerate(events):
            hard = {i for i in running if not node.steps[i].is_soft}
            if cutoff <= at and not hard:
                ends = [outcome.at for outcome, step in zip(outcomes, node.steps, strict=True) if not step.is_soft]
                return max([cutoff, *ends]), order
            if cutoff <= at and node.steps[index].is_soft:
                running.discard(index)
                continue
            twins = [i for when, i in events[position + 1 :] if when == at]
            outcome = outcomes[index]
            running.discard(index)
            hard.discard(index)
            if isinstance(outcome, FailsError):
                is_spare = outcome.code == LATE and len(order) >= needed and not hard
                if not node.steps[index].is_soft or not is_spare:
                    if twins:
                        raise AmbiguousError
                    raise outcome
            elif outcome.has_answered:
                order.append(index)
            if len(order) + len(running) < needed:
                if twins:
                    raise AmbiguousError
                codes = {o.code for i, o in enumerate(outcomes) if i not in running and i not in order and o.code}
                raise FailsError(
                    at, "INVALID_ARGUMENT" if not codes else codes.pop() if len(codes) == 1 else "UNAVAILABLE"
                )
            if cutoff == NEVER and node.straggler_ms and len(order) >= needed and (node.quorum or not hard):
                cutoff = at + node.straggler_ms * 1_000_000
        if len({outcomes[i].at for i in order}) < len(order):
            raise AmbiguousError
        return max(outcomes[i].at for i in range(len(outcomes)) if self.counts(node, outcomes, i, cutoff)), order

    def counts(self, node: Node, outcomes: Sequence[Ends | FailsError], index: int, cutoff: int) -> bool:
        """Whether a member was waited for to its end."""
        return not node.steps[index].is_soft or outcomes[index].at < cutoff


def call(model: Model, inputs: Mapping[str, Rows], at: int, deadline: int) -> Ends:
    """A model's answer. Raises FailsError."""
    delay_ns, fails = model.fate(at)
    end = at + delay_ns
    if end >= deadline:
        raise FailsError(max(at, deadline), LATE)
    if fails:
        raise FailsError(end, model.code)
    given = {name: rows for name, rows in inputs.items() if rows is not None}
    num_rows = len(next(iter(given.values())))
    return Ends(end, [model.row({name: rows[row] for name, rows in given.items()}) for row in range(num_rows)])


def steps_within(node: Node) -> Iterator[Step]:
    """Every step of a node and of the nodes in it."""
    for step in node.steps:
        for one in (step, step.fallback):
            if one is not None:
                yield one
                if isinstance(one.target, Node):
                    yield from steps_within(one.target)
