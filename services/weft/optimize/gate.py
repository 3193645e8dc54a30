"""The gate: which candidates may be written, and which of them is. Plain rules over figures."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.optimize.bootstrap import UNSEEN, Loss

#: A candidate is faster if it saves at least this share of the time; less is within what a machine's noise moves.
MIN_SAVING = 0.05
#: Shares of the original's time that differ by no more are equal.
_SAME = 0.01


class GateCandidate(NamedTuple):
    """A candidate that the gate lets through.

    Attributes:
        name: Of its method.
        time_ratio: Its time, by the objective, as a share of the original's.
        size_bytes: Of its files.
    """

    name: str
    time_ratio: float
    size_bytes: int


def refusal(loss: Loss, max_loss: float) -> str:
    """Why a candidate with this loss is not let through; "" if it is.

    What counts is the upper end of the interval: a small loss over few rows, or none, proves little.
    """
    if loss.high <= max_loss:
        return ""
    if loss.value > max_loss:
        return f"it loses {loss.value:.2%}, {max_loss:.2%} is allowed"
    return (
        f"it may lose up to {loss.high:.2%}, {max_loss:.2%} is allowed: {loss.num_rows} held-out rows cannot tell; "
        f"{_needs(loss, max_loss)}"
    )


def _needs(loss: Loss, max_loss: float) -> str:
    """How many rows would show a loss within the limit if they were like these, whose loss is not above it."""
    if max_loss <= max(loss.value, 0.0):
        return "no number of rows shows that"
    num_rows = UNSEEN[0] / max_loss
    if loss.num_worse:  # four times the rows halve the interval
        num_rows = max(num_rows, loss.num_rows * ((loss.high - loss.value) / (max_loss - loss.value)) ** 2)
    about = "about " if loss.num_worse else ""
    return f"needs {about}{math.ceil(round(num_rows, 3))} rows: give more data, or raise --held-out-rows"


def pick(contenders: Sequence[GateCandidate]) -> tuple[str, str]:
    """The fastest of those that were let through, of equals the smallest; or "" and why there is none."""
    if not contenders:
        return "", "no candidate passes the gate"
    best = min(contenders, key=lambda one: one.time_ratio)
    if best.time_ratio > 1 - MIN_SAVING:
        return "", (
            f"no candidate that passes the gate is faster: the best, {best.name}, takes {best.time_ratio:.4g} of the "
            f"original's time, and {1 - MIN_SAVING:.2f} or less counts as faster"
        )
    limit = min(best.time_ratio + _SAME, 1 - MIN_SAVING)
    return min((one for one in contenders if one.time_ratio <= limit), key=lambda one: one.size_bytes).name, ""
