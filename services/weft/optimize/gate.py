"""The gate: which candidates may be written, and which of them is. Plain rules over figures."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.optimize.bootstrap import Loss

#: A candidate is cheaper if it saves at least this share of the CPU time; less is within what a machine's noise moves.
MIN_SAVING = 0.05
#: With 95 % confidence an event that was never seen in n rows has a probability below 3/n.
_RULE_OF_THREE = 3.0


class GateCandidate(NamedTuple):
    """A candidate that the gate lets through.

    Attributes:
        name: Of its method.
        cost_ratio: Its CPU time as a share of the original's.
        size_bytes: Of its files.
    """

    name: str
    cost_ratio: float
    size_bytes: int


def refusal(loss: Loss, max_loss: float) -> str:
    """Why a candidate with this loss is not let through; "" if it is.

    What counts is the upper end of the interval: a small loss over few rows proves little.
    """
    if loss.high <= max_loss:
        return ""
    if loss.value > max_loss:
        return f"it loses {loss.value:.2%}, {max_loss:.2%} is allowed"
    return (
        f"it may lose up to {loss.high:.2%}, {max_loss:.2%} is allowed; {loss.num_rows} rows do not show that it loses "
        "less: give more data, or raise --held-out-rows"
    )


def caution(loss: Loss, max_loss: float) -> str:
    """What the rows cannot show, though the gate lets the candidate through; "" if nothing."""
    unseen = _RULE_OF_THREE / loss.num_rows
    if loss.num_worse or unseen <= max_loss:
        return ""
    return (
        f"none of {loss.num_rows} rows is worse, which leaves up to {unseen:.2%} of all rows that may be; "
        f"{round(_RULE_OF_THREE / max_loss) if max_loss else 'no number of'} held-out rows would show {max_loss:.2%}"
    )


def pick(contenders: Sequence[GateCandidate]) -> tuple[str, str]:
    """The cheapest of those that were let through, of equals the smallest; or "" and why there is none."""
    if not contenders:
        return "", "no candidate passes the gate"
    best = min(contenders, key=lambda one: (round(one.cost_ratio, 2), one.size_bytes))
    if best.cost_ratio > 1 - MIN_SAVING:
        return "", (
            f"no candidate that passes the gate is cheaper: the best, {best.name}, needs {best.cost_ratio:.2f} of the "
            f"original's CPU time, and {1 - MIN_SAVING:.2f} or less counts as cheaper"
        )
    return best.name, ""
