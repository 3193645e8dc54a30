"""What the naive interpreter works with: rows, how a step ends, what is made of several answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.unit.weft_router.random_graphs import Step, Test, default_row

from weft_router.combine import METHODS, CombineMethod

Rows = list[bytes] | None
Values = dict[str, Rows]
NEVER = 1 << 62
LATE = "DEADLINE_EXCEEDED"


class AmbiguousError(Exception):
    """Two things happen in the same instant, and the order makes a difference."""


@dataclass
class FailsError(Exception):
    """The step or node fails."""

    at: int
    code: str


@dataclass
class Ends:
    """The step or node has ended.

    Attributes:
        at: When.
        output: Its output, if it is there.
        has_answered: Of a step: whether it, or its fallback, gave an answer.
        code: Of a step that failed softly: why.
    """

    at: int
    output: Rows
    has_answered: bool = True
    code: str = ""


def race(outcomes: Sequence[Ends | FailsError]) -> Ends:
    """The first answer."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, Ends) and outcome.has_answered]
    if answers:
        first = min(answers, key=lambda answer: answer.at)
        if sum(answer.at == first.at for answer in answers) > 1:
            raise AmbiguousError
        return Ends(first.at, first.output)
    last = max(outcome.at for outcome in outcomes)
    for kind in (FailsError, Ends):
        for outcome in outcomes:
            if isinstance(outcome, kind) and outcome.code:
                raise FailsError(last, outcome.code)
    raise FailsError(last, "INVALID_ARGUMENT")


def earliest(failures: Sequence[FailsError]) -> FailsError:
    """The failure that the others are cancelled by."""
    first = min(failures, key=lambda failure: failure.at)
    if len({failure.code for failure in failures if failure.at == first.at}) > 1:
        raise AmbiguousError
    return first


def holds(test: Test, values: Values) -> bool:
    rows = values[test.name]
    if rows is None:
        return False
    return test.name.startswith("steps.") or first_bytes(rows) % 4 < test.rest


def first_bytes(rows: Rows) -> int:
    return sum(row[0] for row in rows or [])


def some(values: Values, rows: Sequence[int]) -> Values:
    """The values with some of their rows."""
    return {name: None if whole is None else [whole[row] for row in rows] for name, whole in values.items()}


def default(step: Step, values: Values) -> Rows:
    return [default_row(step)] * len(values["X"] or []) if step.has_default else None


def majority(ballots: Sequence[bytes]) -> bytes:
    return max(ballots, key=lambda ballot: (ballots.count(ballot), -ballots.index(ballot)))


def by_byte(function: Callable[[Sequence[int]], int]) -> Callable[[Sequence[bytes]], bytes]:
    return lambda rows: bytes(function(column) for column in zip(*rows, strict=True))


def by_row(function: Callable[[Sequence[bytes]], bytes]) -> Callable[[Sequence[list[bytes]]], list[bytes]]:
    return lambda outputs: [function(rows) for rows in zip(*outputs, strict=True)]


COMBINED: dict[CombineMethod, Callable[[Sequence[list[bytes]]], list[bytes]]] = {
    METHODS["VOTE"]: by_row(majority),
    METHODS["MAX"]: by_row(by_byte(max)),
    METHODS["SUM"]: by_row(by_byte(lambda column: min(sum(column), 255))),
}
