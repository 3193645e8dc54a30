"""How many drafts a sequence gets in a step: by its measured acceptance, and by what further rows of a step cost."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from typing_extensions import override

#: Weight of a draft in the moving average of acceptance: of the first one, and of each after a number of them.
_FIRST_WEIGHT, _LAST_WEIGHT = 1 / 3, 0.1
#: Acceptance that a proposer is assumed to have before the first draft.
_PRIOR = 0.6
#: Tokens must come this much cheaper with drafts than without; the measured costs are not exact.
_MARGIN = 1.15
#: Steps of a sequence without drafts before one is tried again; doubles with each failure.
_FIRST_PAUSE, _LAST_PAUSE = 16, 1024
#: Time to plan, guess and check the drafts of a sequence on the host, measured on a CPU core with AVX-512.
_HOST_S = 20e-6


class Acceptance:
    """How often the drafts of one sequence were accepted.

    Args:
        rate: Moving average to start with.

    Attributes:
        rate: Moving average of the acceptance of a draft whose predecessors were accepted, 0 to 1.
        pause: Length of the next pause, in steps.
        num_left: Steps that are left of the pause after the last wrong draft.
    """

    __slots__ = ("_weight", "num_left", "pause", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._weight = _FIRST_WEIGHT
        self.pause = _FIRST_PAUSE
        self.num_left = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Record that of ``num_drafts`` the first ``num_accepted`` were accepted; those behind them do not count."""
        for _ in range(num_accepted):
            self._move(1.0)
        if num_accepted:
            self.pause = _FIRST_PAUSE
        if num_accepted < num_drafts:
            self._move(0.0)
            self.num_left = self.pause
            self.pause = min(2 * self.pause, _LAST_PAUSE)

    def _move(self, seen: float) -> None:
        self.rate += self._weight * (seen - self.rate)
        self._weight = max(self._weight / (1.0 + self._weight), _LAST_WEIGHT)  # 1/3, 1/4, 1/5 ...: a plain average


class CostCurve:
    """Time of a step by its number of rows, piecewise linear between measured points, continued beyond.

    Args:
        points: Rows and seconds, in the order of rows, at least one. A step with more rows than another is taken to be
            no faster.
        draft_s: Time that the proposer needs for one draft, in seconds.
    """

    def __init__(self, points: Sequence[tuple[int, float]], draft_s: float = 0.0) -> None:
        self.draft_s = draft_s
        self._rows = [rows for rows, _ in points]
        self._seconds = list(accumulate((seconds for _, seconds in points), max))
        self._table: list[float] = []

    def __call__(self, num_rows: int) -> float:
        """Seconds of a step of ``num_rows`` rows."""
        table = self._table
        while len(table) <= num_rows:
            table.append(self._interpolated(len(table)))
        return table[num_rows]

    def _interpolated(self, num_rows: int) -> float:
        rows, seconds = self._rows, self._seconds
        if num_rows <= rows[0]:
            return seconds[0]
        right = bisect_left(rows, num_rows)
        slope = (seconds[-1] - seconds[0]) / max(rows[-1] - rows[0], 1)
        if right == len(rows):  # a last piece that is flat by chance must not make all further rows free
            if right > 1:
                slope = max(slope, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
            return seconds[-1] + slope * (num_rows - rows[-1])
        share = (num_rows - rows[right - 1]) / (rows[right] - rows[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


class AdaptiveDepth:
    """As many drafts as make tokens cheaper: by each sequence's acceptance and the cost of the step's further rows.

    With acceptance ``a``, ``k`` drafts are expected to bring ``a + a^2 + ... + a^k`` tokens. Their price is what the
    step brings in the time that their rows add, where tokens of a prompt count as much as new ones. A sequence gets the
    ``k`` with the largest surplus, if they bring more than the price by a margin. In a full step, of decodes or of
    prompts, further rows cost as much as the others, so no sequence gets drafts.

    A sequence whose acceptance would be too low on an idle engine too pauses, then gets single drafts until one is
    wrong; pauses double with each failure. New sequences start with the average acceptance of the engine, or with just
    enough for a draft, so that where drafts are always wrong each sequence pays for one.

    Args:
        max_drafts: Most drafts of a sequence.
        cost: Time of a greedy step.
        sampled_cost: Time of a step at a temperature above 0, whose rows cost more; None: the same.

    Attributes:
        is_full: No further sequence of the step gets drafts.
    """

    def __init__(self, max_drafts: int, cost: CostCurve, sampled_cost: CostCurve | None = None) -> None:
        self.is_full = False
        self._max_drafts = max_drafts
        self._overall = Acceptance(_PRIOR)
        self._costs = (cost, sampled_cost or cost)
        # The least acceptance, in percent, that pays on an idle engine.
        self._least_rates = (self._least_paying(is_greedy=True), self._least_paying(is_greedy=False))

    def begin(self, num_rows: int, *, is_greedy: bool = True) -> None:
        """A step starts that computes ``num_rows`` tokens without drafts, all of them at temperature 0 or not.

        ``choose`` follows for each sequence in the order of service.
        """
        self._is_greedy = is_greedy
        self._cost = self._costs[not is_greedy]
        self._num_rows, self._num_tokens, self._seconds = num_rows, float(num_rows), self._cost(num_rows)
        self._set_prices()

    def choose(self, acceptance: Acceptance) -> int:
        """Most drafts for the next sequence, 0 or more."""
        if self.is_full:
            return 0
        if acceptance.rate >= self._least_rates[not self._is_greedy]:
            return self._best(acceptance.rate)
        if acceptance.num_left:
            acceptance.num_left -= 1
            return 0
        return int(self._prices[0] * _MARGIN <= 1.0)

    def add(self, acceptance: Acceptance, num_drafts: int) -> None:
        """The sequence of the last ``choose`` gets ``num_drafts``, at most as many as chosen."""
        self._seconds += self._added_s(num_drafts)
        self._num_rows += num_drafts
        self._num_tokens += sum(acceptance.rate**place for place in range(1, num_drafts + 1))
        self._set_prices()

    def new_acceptance(self) -> Acceptance:
        """State of a new sequence."""
        return Acceptance(max(self._overall.rate, min(*self._least_rates, _PRIOR)))

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Of the ``num_drafts`` of a sequence, ``num_accepted`` were accepted."""
        acceptance.add(num_drafts, num_accepted)
        self._overall.add(num_drafts, num_accepted)

    def _added_s(self, num_drafts: int) -> float:
        """Time that ``num_drafts`` further rows add to the step."""
        rows_s = self._cost(self._num_rows + num_drafts) - self._cost(self._num_rows)
        return rows_s + num_drafts * self._cost.draft_s + _HOST_S

    def _least_paying(self, *, is_greedy: bool) -> float:
        self.begin(1, is_greedy=is_greedy)
        return next((rate / 100 for rate in range(1, 101) if self._best(rate / 100)), 1.0)

    def _set_prices(self) -> None:
        """Compute what 1, 2 ... drafts must bring, in tokens, so that tokens of the step do not become dearer."""
        token_rate = self._num_tokens / self._seconds
        self._prices = [token_rate * self._added_s(num_drafts) for num_drafts in range(1, self._max_drafts + 1)]
        self.is_full = all(price * _MARGIN > number for number, price in enumerate(self._prices, 1))

    def _best(self, rate: float) -> int:
        """Number of drafts with acceptance ``rate`` that brings most beyond its price; 0: none does by the margin."""
        best, best_surplus = 0, 0.0
        likely, gain = 1.0, 0.0
        for number, price in enumerate(self._prices, 1):
            likely *= rate
            gain += likely
            if gain >= price * _MARGIN and gain - price > best_surplus:
                best, best_surplus = number, gain - price
        return best


class FixedDepth(AdaptiveDepth):
    """The same number of drafts for all sequences at all times, for tests and measurements."""

    def __init__(self, num_drafts: int) -> None:
        self.is_full = False
        self._num_drafts = num_drafts

    @override
    def begin(self, num_rows: int, *, is_greedy: bool = True) -> None:
        pass

    @override
    def choose(self, acceptance: Acceptance) -> int:
        return self._num_drafts

    @override
    def add(self, acceptance: Acceptance, num_drafts: int) -> None:
        pass

    @override
    def new_acceptance(self) -> Acceptance:
        return Acceptance(_PRIOR)

    @override
    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        pass
