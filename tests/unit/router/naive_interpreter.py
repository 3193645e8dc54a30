"""What a random graph answers, worked out one step at a time.

Written from the description of the language alone; it shares no code with the executor. Nothing runs at once here: a
step is told when it starts and tells when it ends, and who came first is looked up afterwards. A tensor is a list of
its rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tests.unit.router.naive_pieces import BrokenError, pieces_of
from tests.unit.router.naive_types import live_steps, read_in, waits_for
from tests.unit.router.naive_values import (
    COMBINED,
    LATE,
    NEVER,
    AmbiguousError,
    Ends,
    FailsError,
    Rows,
    UnsoundError,
    Values,
    default,
    earliest,
    holds,
    least_byte,
    num_rows_of,
    present,
    race,
    some,
)
from tests.unit.router.random_graphs import WIDTH, Model, Node, Step, steps_within

from weft.router.combine import METHODS
from weft.router.operators.collector import CollectorPlan
from weft.router.operators.ensemble import EnsemblePlan
from weft.router.operators.map import MapPlan
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan


class Interpreter:
    """Runs graphs.

    Args:
        deadline: Of the request, in ns.
    """

    def __init__(self, deadline: int = NEVER) -> None:
        self.deadline = deadline
        self.kept: dict[tuple[Step, str], Ends] = {}
        self.wanted: dict[Step, Collection[str]] = {}

    def node(self, node: Node, values: Values, at: int, deadline: int, wanted: Collection[str]) -> Ends:
        """Run a node from time `at` on, for those of its outputs that are wanted. Raises FailsError."""
        end = NEVER
        read = read_in(node, wanted)
        self.wanted |= {one: read for step in node.steps for one in step.chain}
        try:
            ends = self.run(node, values, at, deadline, wanted)
            end = ends.at
            return ends
        except FailsError as failure:
            end = failure.at
            raise
        finally:  # what was cancelled then has kept nothing
            steps = set(steps_within(node))
            self.kept = {key: kept for key, kept in self.kept.items() if kept.at <= end or key[0] not in steps}

    def run(self, node: Node, values: Values, at: int, deadline: int, wanted: Collection[str]) -> Ends:
        if node.kind is SequencePlan:
            return self.sequence(node, values, at, deadline, wanted)
        if node.kind is EnsemblePlan:
            return self.ensemble(node, values, at, deadline)
        if node.kind is MapPlan:
            return self.map(node, values, at, deadline)
        if node.kind is CollectorPlan:
            return self.collector(node, values, at, deadline)
        if node.kind is SplitterPlan:
            return self.step(node.steps[-1], values, at, deadline)
        run = self.switch if node.kind is SwitchPlan else self.cascade
        if not node.per_row:
            return run(node, values, at, deadline)
        return (self.switch_rows if node.kind is SwitchPlan else self.cascade_rows)(node, values, at, deadline)

    def step(self, step: Step, values: Values, at: int, deadline: int, *, looks_at_when: bool = True) -> Ends:
        """Run a step. Raises FailsError if it is not soft."""
        if looks_at_when and not all(holds(test, values) for test in step.when):
            return Ends(at, default(step, values), has_answered=False)
        try:
            limit = min(deadline, at + step.timeout_ms * 1_000_000) if step.timeout_ms else deadline
            ends = self.cached(step, values, at, limit)
        except FailsError as failure:
            last = failure
            if step.fallback is not None and failure.at < deadline:
                try:
                    ends = self.step(step.fallback, values, failure.at, deadline)
                    return replace(ends, outputs=default(step, values) | present(ends.outputs))
                except FailsError as other:
                    last = other
            if not step.is_soft or (last.code == LATE and last.at >= self.deadline):
                raise last from None
            return Ends(last.at, default(step, values), has_answered=False, code=last.code)
        return Ends(ends.at, default(step, values) | present(ends.outputs))

    def cached(self, step: Step, values: Values, at: int, deadline: int) -> Ends:
        """As `tried`, but for inputs that the step has answered before."""
        if not step.is_cached:
            return self.tried(step, values, at, deadline)
        key = (step, repr([(name, values[tensor]) for name, tensor in step.inputs]))
        if key not in self.kept:
            self.kept[key] = self.tried(step, values, at, deadline)
            return self.kept[key]
        return Ends(at, self.kept[key].outputs)

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
        """The answer, by the names of the tensors of the node."""
        inputs = inputs_of(step, values)
        if isinstance(step.target, Node):
            wanted = [name for name, tensor in step.outputs if tensor in self.wanted[step]]
            ends = self.node(step.target, {"E": None} | inputs, at, deadline, wanted)
        else:
            ends = call(step.target, inputs, at, deadline)
        return Ends(ends.at, {tensor: ends.outputs.get(name) for name, tensor in step.outputs})

    def sequence(self, node: Node, values: Values, at: int, deadline: int, wanted: Collection[str]) -> Ends:
        inputs = dict(values)
        live = live_steps(node, wanted)
        for left in range(max(node.max_iterations, 1) - 1, -1, -1):
            values, at = self.round(node, live, dict(inputs), at, deadline)
            if node.again is None or not left or not holds(node.again, values):
                break
            if node.carries:
                inputs["X"] = values[node.carries]
        return Ends(at, {name: values.get(name) for name in node.outputs})

    def round(self, node: Node, live: Sequence[int], values: Values, at: int, deadline: int) -> tuple[Values, int]:
        """All tensors of a sequence, and when its last step has ended."""
        ends: dict[str, int] = {}
        failures: list[FailsError] = []
        waiting = {node.steps[index].name: node.steps[index] for index in live}
        needs = {name: waits_for(node, step, set(waiting)) for name, step in waiting.items()}
        while ready := [step for name, step in waiting.items() if needs[name] <= ends.keys()]:
            step = waiting.pop(ready[0].name)
            try:
                end = self.step(step, values, max([at, *(ends[name] for name in needs[step.name])]), deadline)
            except FailsError as failure:
                failures.append(failure)  # steps that wait for it never start
                continue
            values |= end.outputs
            values[f"steps.{step.name}"] = [b""] if end.has_answered else None
            ends[step.name] = end.at
        if failures:
            raise earliest(failures)
        return values, max([at, *ends.values()])

    def switch(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        return self.step(self.branch(node, values, at), values, at, deadline, looks_at_when=False)

    def branch(self, node: Node, values: Values, at: int) -> Step:
        on = str(least_byte(values["X"]) % 3)
        for step in node.steps:
            if step.value == on or (step.when and all(holds(test, values) for test in step.when)):
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
        outputs = {name: joined(num_rows, [(rows, e.outputs.get(name)) for rows, e in ended]) for name in node.outputs}
        return Ends(max(ends.at for _, ends in ended), outputs)

    def cascade(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        latest: Ends | None = None
        reason = FailsError(at, "INVALID_ARGUMENT")
        has_failed = False
        values = dict(values)
        for step in node.steps:
            values[f"steps.{step.name}"] = None
            ends = None
            if not all(holds(test, values) for test in step.when):
                pass
            elif deadline != NEVER and deadline - at < step.min_remaining_ms * 1_000_000:
                if not has_failed:
                    reason = FailsError(at, LATE)
            else:
                try:
                    ends = self.step(step, values, at, deadline, looks_at_when=False)
                except FailsError as failure:
                    if step.is_soft and latest is not None and failure.code == LATE:
                        return Ends(failure.at, latest.outputs)
                    raise
                at = ends.at
                if ends.code:
                    has_failed, reason = True, FailsError(at, ends.code)
            if ends is not None and ends.has_answered:
                values[f"steps.{step.name}"] = [b""]
                latest = ends
                if step.accept is None or holds(step.accept, ends.outputs):
                    return Ends(at, ends.outputs)
        if latest is None:
            raise FailsError(at, reason.code)
        return Ends(at, latest.outputs)

    def cascade_rows(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        """As `cascade` for each row; rows that reach a step travel together."""
        num_rows = len(values["X"] or [])
        answers: dict[int, Values] = {}
        reasons = ["INVALID_ARGUMENT"] * num_rows
        has_failed = [False] * num_rows
        oks: list[Values] = [{} for _ in range(num_rows)]
        waiting = list(range(num_rows))
        for step in node.steps:
            if not waiting:
                break
            ok = f"steps.{step.name}"
            for row in waiting:
                oks[row][ok] = None
            rows = [r for r in waiting if all(holds(test, some(values, [r]) | oks[r]) for test in step.when)]
            if rows and deadline != NEVER and deadline - at < step.min_remaining_ms * 1_000_000:
                for row in rows:
                    reasons[row] = reasons[row] if has_failed[row] else LATE
                rows = []
            ends = None
            if rows:
                try:
                    ends = self.step(step, some(values, rows), at, deadline, looks_at_when=False)
                except FailsError as failure:
                    if step.is_soft and failure.code == LATE and all(row in answers for row in waiting):
                        at = failure.at
                        break
                    raise
                at = ends.at
                if ends.code:
                    for row in rows:
                        has_failed[row], reasons[row] = True, ends.code
            for place, row in enumerate(rows if ends is not None and ends.has_answered else ()):
                assert ends is not None
                answers[row] = some(ends.outputs, [place])
                oks[row][ok] = [b""]
                if step.accept is None or holds(step.accept, answers[row]):
                    waiting.remove(row)
        for row in range(num_rows):
            if row not in answers:
                raise FailsError(at, reasons[row])
        parts = {name: [([row], answers[row].get(name)) for row in range(num_rows)] for name in node.outputs}
        return Ends(at, {name: joined(num_rows, of_rows) for name, of_rows in parts.items()})

    def map(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        """The rows of the lists that are made of X, in chunks; then one tensor is made of X and their answers."""
        assert node.split is not None
        assert node.join is not None
        x, e = values["X"] or [], values["E"]
        at = call(node.split, {"X": x}, at, deadline).at
        lists, counts = node.split.lists([{"X": row} for row in x])
        size = len(lists[0])
        rows = [(owner, i) for owner in range(len(x)) for i in range(counts[owner] if node.has_lengths else size)]
        given: Values = {"L": [lists[owner][i] for owner, i in rows], "E": e and [e[owner] for owner, _ in rows]}
        at, answers = self.chunks(node, values, given, at, deadline)
        whole: Rows = None
        lengths: Rows = None
        if answers is not None:
            answer_of = dict(zip(rows, answers, strict=True))
            padding = b"" if node.collects_lists else bytes(WIDTH)
            entries = [[answer_of.get((owner, i), padding) for i in range(size)] for owner in range(len(x))]
            whole = [b"".join(one) for one in entries]
            if node.collects_lists:
                whole = [one.ljust(max(map(len, whole)), b"\0") for one in whole]
                lengths = [b"".join(len(row).to_bytes(8, "little") for row in one) for one in entries]
        joined = {"X": x, "L": whole} | ({"N": lengths} if node.collects_lists else {})
        ends = call(node.join, joined, at, deadline)
        return Ends(ends.at, {"Y": ends.outputs["OUT"]})

    def collector(self, node: Node, values: Values, at: int, deadline: int) -> Ends:
        """The whole of a model's stream. Its responses come one after another, and its end after as long a while."""
        (step,) = node.steps
        assert isinstance(step.target, Model)
        inputs = inputs_of(step, values)
        if any(inputs[name] is None for name in step.target.required):
            raise UnsoundError
        delay_ns, fails = step.target.fate(0)
        responses = list(map(dict, step.target.responses(rows_of(inputs))))
        for number in range(1, len(responses) + 1):
            if at + delay_ns * number >= deadline:
                raise FailsError(max(at, deadline), LATE)
            try:
                pieces_of(node, responses[:number], is_over=False)
            except BrokenError as broken:
                raise FailsError(at + delay_ns * number, broken.code) from None
        end = at + delay_ns * (len(responses) + 1)
        if end >= deadline:
            raise FailsError(max(at, deadline), LATE)
        if fails or not responses:
            raise FailsError(end, step.target.code if fails else "UNKNOWN")
        return Ends(end, pieces_of(node, responses, is_over=True)[0])

    def chunks(self, node: Node, values: Values, given: Values, at: int, deadline: int) -> tuple[int, Rows]:
        """When the step has run for all rows, some at once, and their answers."""
        step, num_rows = node.steps[0], len(given["L"] or [])
        if not all(holds(test, values) for test in step.when):
            return at, default(step, {"L": given["L"]})["Y"]
        free = [at] * (node.max_inflight or 8)
        end, answers, is_whole = at, list[bytes](), True
        failures: list[FailsError] = []
        chunk_rows = node.chunk_rows or 64
        for first in range(0, num_rows, chunk_rows):
            part = some(given, range(first, min(first + chunk_rows, num_rows)))
            start = min(free)
            if failures and start >= earliest(failures).at:
                break
            free.remove(start)
            try:
                ends = self.step(step, part, start, deadline, looks_at_when=False)
            except FailsError as failure:
                failures.append(failure)
                free.append(failure.at)
                continue
            free.append(ends.at)
            end = max(end, ends.at)
            answers += ends.outputs["Y"] or []
            is_whole = is_whole and ends.outputs["Y"] is not None
        if failures:
            raise earliest(failures)
        return end, answers if is_whole else None

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
            has_answered = index in order and isinstance(one, Ends)
            outputs.append((one.outputs if has_answered else default(step, values))["Y"])  # type: ignore[union-attr]
        there = [output for output in outputs if output is not None]
        if node.method is METHODS["FIRST"]:
            first = [outputs[index] for index in order if outputs[index] is not None]
            return Ends(at, {"Y": [*first, *there][0] if there else None})
        if not there:
            return Ends(at, {"Y": None})
        if node.custom is None:
            return Ends(at, {"Y": COMBINED[node.method](there)})
        num_rows = len(there[0])
        stack = [b"".join(bytes(WIDTH) if o is None else o[row] for o in outputs) for row in range(num_rows)]
        mask = bytes(output is not None for output in outputs)
        ends = call(node.custom, {"S": stack, "MASK": [mask] * num_rows}, at, deadline)
        return Ends(ends.at, {"Y": ends.outputs["OUT"]})

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


def call(model: Model, inputs: Values, at: int, deadline: int) -> Ends:
    """A model's answer. Raises FailsError; UnsoundError without an input that it must have."""
    if any(inputs[name] is None for name in model.required):
        raise UnsoundError
    delay_ns, fails = model.fate(at)
    end = at + delay_ns
    if end >= deadline:
        raise FailsError(max(at, deadline), LATE)
    if fails:
        raise FailsError(end, model.code)
    return Ends(end, dict(model.answer(rows_of(inputs))))


def inputs_of(step: Step, values: Values) -> Values:
    """What the target of a step gets; a constant stands in each row."""
    inputs = {name: values[tensor] for name, tensor in step.inputs}
    return inputs | {name: [row] * num_rows_of(inputs) for name, row in step.constants}


def rows_of(inputs: Values) -> list[dict[str, bytes]]:
    """The rows of what is there."""
    given = present(inputs)
    return [{name: values[row] for name, values in given.items() if values} for row in range(num_rows_of(given))]


def joined(num_rows: int, parts: Sequence[tuple[Sequence[int], Rows]]) -> Rows:
    """A tensor of rows that took several ways; absent where one of these did not give it."""
    whole = [b""] * num_rows
    for rows, values in parts:
        if values is None:
            return None
        for row, value in zip(rows, values, strict=True):
            whole[row] = value
    return whole
