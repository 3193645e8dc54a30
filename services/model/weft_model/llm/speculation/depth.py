"""How many drafts a sequence gets in a step: by its measured acceptance, and by what further rows of a step cost."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: Weight of one draft in the moving average of acceptance.
_SMOOTHING = 0.1
#: Acceptance that a proposer is assumed to have before the first draft.
_PRIOR = 0.6
#: Tokens must come this much cheaper with drafts than without; the measured costs are not exact.
_MARGIN = 1.15
#: Steps of a sequence without drafts before one is tried again; doubles with each failure.
_FIRST_PAUSE, _LAST_PAUSE = 16, 256


class Acceptance:
    """How often the drafts of one sequence were accepted.

    Args:
        rate: Moving average to start with.

    Attributes:
        rate: Moving average of the acceptance of a draft whose predecessors were accepted, 0 to 1.
        pause: Length of the next pause, in steps.
        num_left: Steps that are left of the pause after the last wrong draft.
    """

    __slots__ = ("num_left", "pause", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.pause = _FIRST_PAUSE
        self.num_left = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Record that of ``num_drafts`` the first ``num_accepted`` were accepted; those behind them do not count."""
        for _ in range(num_accepted):
            self.rate += _SMOOTHING * (1.0 - self.rate)
        if num_accepted:
            self.pause = _FIRST_PAUSE
        if num_accepted < num_drafts:
            self.rate -= _SMOOTHING * self.rate
            self.num_left = self.pause
            self.pause = min(2 * self.pause, _LAST_PAUSE)


class CostCurve:
    """Time of a step by its number of rows, piecewise linear between measured points, continued beyond the last.

    Args:
        points: Rows and seconds, in the order of rows, at least one. A step with more rows than another is taken to be
            no faster.
        draft_s: Time that the proposer needs for one draft, in seconds.
    """

    def __init__(self, points: Sequence[tuple[int, float]], draft_s: float = 0.0) -> None:
        self._rows = [rows for rows, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self.draft_s = draft_s

    def __call__(self, num_rows: int) -> float:
        """Seconds of a step of ``num_rows`` rows."""
        rows, seconds = self._rows, self._seconds
        if len(rows) == 1:
            return seconds[0]
        right = min(max(bisect_right(rows, num_rows), 1), len(rows) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (rows[right] - rows[right - 1])
        return max(seconds[right] + slope * (num_rows - rows[right]), seconds[0])


class Depth(Protocol):
    """Policy of one engine; a step calls ``begin``, then ``choose`` for each sequence in the order of service."""

    def begin(self, num_seqs: int, num_rows: int) -> bool:
        """A step starts with ``num_rows`` tokens, ``num_seqs`` of them decodes; False: none of these gets a draft."""

    def choose(self, acceptance: Acceptance) -> int:
        """Most drafts for the next sequence, 0 or more."""

    def add(self, acceptance: Acceptance, num_drafts: int) -> None:
        """The sequence of the last ``choose`` gets ``num_drafts``, at most as many as chosen."""

    def new_acceptance(self) -> Acceptance:
        """State of a new sequence."""

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Of the ``num_drafts`` of a sequence, ``num_accepted`` were accepted."""


class FixedDepth:
    """The same number of drafts for all sequences at all times, for tests and measurements.

    Args:
        num_drafts: Drafts of each sequence in each step.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def begin(self, num_seqs: int, num_rows: int) -> bool:
        """See ``Depth``."""
        return True

    def choose(self, acceptance: Acceptance) -> int:
        """See ``Depth``."""
        return self._num_drafts

    def add(self, acceptance: Acceptance, num_drafts: int) -> None:
        """See ``Depth``."""

    def new_acceptance(self) -> Acceptance:
        """See ``Depth``."""
        return Acceptance(_PRIOR)

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """See ``Depth``."""


class AdaptiveDepth:
    """As many drafts as make tokens cheaper: by each sequence's acceptance and the cost of the step's further rows.

    With acceptance ``a``, ``k`` drafts are expected to bring ``a + a^2 + ... + a^k`` tokens. A sequence gets the ``k``
    with the most expected tokens per second of the whole step, if its further rows bring more tokens per second than
    the step does without them, by a margin. A step that is full, of decodes or of prompts, is at its knee: further rows
    cost in it as much as the others, so no sequence gets drafts.

    A sequence whose acceptance would be too low on an idle engine too pauses, then gets single drafts until one is
    wrong; pauses grow with each failure. New sequences start with the average acceptance of the engine.

    Args:
        max_drafts: Most drafts of a sequence.
        cost: Time of a step.
    """

    def __init__(self, max_drafts: int, cost: CostCurve) -> None:
        self._max_drafts = max_drafts
        self._cost = cost
        self._overall = Acceptance(_PRIOR)
        self._idle = _Step(1, 1.0, cost(1))
        self._step = self._idle

    def begin(self, num_seqs: int, num_rows: int) -> bool:
        """See ``Depth``; False: not even drafts that are never wrong would pay."""
        self._step = _Step(num_rows, float(num_seqs), self._cost(num_rows))
        return self._best(self._step, 1.0, self._max_drafts) > 0

    def choose(self, acceptance: Acceptance) -> int:
        """See ``Depth``."""
        num_drafts = self._best(self._step, acceptance.rate, self._max_drafts)
        if num_drafts or self._best(self._idle, acceptance.rate, self._max_drafts):
            return num_drafts
        if acceptance.num_left:
            acceptance.num_left -= 1
            return 0
        return self._best(self._step, 1.0, 1)

    def add(self, acceptance: Acceptance, num_drafts: int) -> None:
        """See ``Depth``."""
        num_rows, num_tokens, seconds = self._step
        seconds += self._cost(num_rows + num_drafts) - self._cost(num_rows) + num_drafts * self._cost.draft_s
        num_tokens += sum(acceptance.rate**place for place in range(1, num_drafts + 1))
        self._step = _Step(num_rows + num_drafts, num_tokens, seconds)

    def new_acceptance(self) -> Acceptance:
        """See ``Depth``."""
        return Acceptance(max(self._overall.rate, _PRIOR / 2))

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """See ``Depth``."""
        acceptance.add(num_drafts, num_accepted)
        self._overall.add(num_drafts, num_accepted)

    def _best(self, step: "_Step", rate: float, most: int) -> int:
        """Number of drafts, up to ``most``, with acceptance ``rate`` that makes the tokens of a step cheapest."""
        num_rows, num_tokens, seconds = step
        before = self._cost(num_rows)
        best, best_rate = 0, num_tokens / seconds
        least = _MARGIN * best_rate
        likely, gain = 1.0, 0.0
        for num_drafts in range(1, most + 1):
            likely *= rate
            gain += likely
            added = self._cost(num_rows + num_drafts) - before + num_drafts * self._cost.draft_s
            token_rate = (num_tokens + gain) / (seconds + added)
            if gain >= least * added and token_rate > best_rate:
                best, best_rate = num_drafts, token_rate
        return best


class _Step(NamedTuple):
    """What a step has so far.

    Attributes:
        num_rows: Tokens that it computes.
        num_tokens: New tokens that it is expected to bring.
        seconds: Time that it is expected to take.
    """

    num_rows: int
    num_tokens: float
    seconds: float
