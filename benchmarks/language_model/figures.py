"""What the cases give: figures with their rounds and, where one is set, a target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from benchmarks.report import table

_IS_MET: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    "<": lambda value, bound: value < bound,
    "=": lambda value, bound: value == bound,
}


class Target(NamedTuple):
    """What is wanted of a figure: ``relation`` is ``>=``, ``<=``, ``<`` or ``=``."""

    relation: str
    bound: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        case: ``"C1"`` to ``"C8"``, or ``"serving"``.
        what: What was measured.
        value: Median of the rounds; None where it could not be measured.
        unit: Of the value.
        rounds: The value in each round.
        target: What is wanted, such as ``">= 5"``; ``""``: nothing is.
        is_met: Whether the value is that; None without a target.
        note: What one must know to read it.
    """

    case: str
    what: str
    value: float | None
    unit: str
    rounds: tuple[float, ...]
    target: str = ""
    is_met: bool | None = None
    note: str = ""


def figure(
    case: str, what: str, rounds: Sequence[float], unit: str, *, target: Target | None = None, note: str = ""
) -> Figure:
    """The figure of these rounds; without rounds it could not be measured."""
    value = float(f"{median(rounds):.5g}") if rounds else None
    spelled = f"{target.relation} {target.bound:g}" if target is not None else ""
    is_met = None if target is None or value is None else _IS_MET[target.relation](value, target.bound)
    return Figure(case, what, value, unit, tuple(float(f"{one:.5g}") for one in rounds), spelled, is_met, note)


def render(figures: Sequence[Figure]) -> str:
    """A table with one line for each figure, and the notes below."""
    lines = [["case", "figure", "value", "unit", "rounds", "target", ""]]
    notes: list[str] = []
    for one in figures:
        mark = {True: "met", False: "MISSED", None: ""}[one.is_met]
        if one.note and one.note not in notes:
            notes.append(one.note)
        what = f"{one.what} [{notes.index(one.note) + 1}]" if one.note else one.what
        spread = f"{shown(min(one.rounds))} to {shown(max(one.rounds))}" if len(one.rounds) > 1 else ""
        lines.append([one.case, what, shown(one.value), one.unit, spread, one.target, mark])
    numbered = [f"[{number}] {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([table(lines, left_columns=(0, 1, 3, 5, 6)), *numbered])


def shown(value: float | None) -> str:
    """A number as people read it."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
