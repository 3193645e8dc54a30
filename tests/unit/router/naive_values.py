"""What the naive interpreter works with: rows, how a step ends, what is made of several answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.unit.router.random_graphs import Step, Test, default_row

from weft.router.combine import METHODS, CombineMethod

Rows = list[bytes] | None
Values = dict[str, Rows]
NEVER = 1 << 62
LATE = "DEADLINE_EXCEEDED"


class AmbiguousError(Exception):
    """Two things happen in the same instant, and the order makes a difference."""


class UnsoundError(Exception):
    """A tensor that must be there is absent."""


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
        outputs: What it gives; None is absent.
        has_answered: Of a step: whether it, or its fallback, gave an answer.
        code: Of a step that failed softly: why.
    """

    at: int
    outputs: Values
    has_answered: bool = True
    code: str = ""


def race(outcomes: Sequence[Ends | FailsError]) -> Ends:
    """The first answer."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, Ends) and outcome.has_answered]
    if answers:
        first = min(answers, key=lambda answer: answer.at)
        if sum(answer.at == first.at for answer in answers) > 1:
            raise AmbiguousError
        return Ends(first.at, first.outputs)
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
    is_there = rows is not None
    if not test.is_of_step and test.rest:
        return (is_there and least_byte(rows) % 4 < test.rest) != test.is_not
    return is_there != test.is_not


def least_byte(rows: Rows) -> int:
    """The least byte of a tensor."""
    return min(byte for row in rows or [] for byte in row)


def num_rows_of(values: Values) -> int:
    """How many rows there are."""
    return len(next(rows for rows in values.values() if rows is not None))


def some(values: Values, rows: Sequence[int]) -> Values:
    """The values with some of their rows."""
    return {
        name: None if whole is None or name.startswith("steps.") else [whole[row] for row in rows]
        for name, whole in values.items()
    }


def present(values: Values) -> Values:
    """Those that are there."""
    return {name: rows for name, rows in values.items() if rows is not None}


def default(step: Step, values: Values) -> Values:
    """What a step gives that has not answered; of an answer that leaves something out, what stands for that."""
    num_rows = num_rows_of(values)
    return {
        tensor: [default_row(step, tensor)] * num_rows if tensor in step.defaults else None
        for _, tensor in step.outputs
    }


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
