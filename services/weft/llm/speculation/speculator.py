"""``Speculator``: how many drafts each sequence gets, and from which proposer."""

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Protocol, cast

from typing_extensions import override

from weft.llm.request import NO_SPECULATION
from weft.llm.scheduler.plan import UNKNOWN_TOKEN
from weft.llm.scheduler.sequence import Sequence

#: Weight of a draft in the moving average of acceptance: of the first one, and of each after a number of them.
_FIRST_WEIGHT, _LAST_WEIGHT = 1 / 3, 0.1
#: Acceptance that a proposer is assumed to have before the first draft.
_PRIOR = 0.6
#: Tokens must come this much cheaper with drafts than without; the measured costs are not exact.
_MARGIN = 1.15
#: Steps of a sequence without drafts before one is tried again; doubles with each failure.
_FIRST_PAUSE, _LAST_PAUSE = 16, 1024
#: Steps with drafts between two without, at first and later.
_FIRST_UNCOMPARED, _MOST_UNCOMPARED = 4, 64
#: Most that a measured time counts, over the expected one; most steps that drafts can be ahead by; and what a step
#: without drafts pays off of their loss.
_MAX_RATIO, _MOST_SAVED, _PAID_OFF = 8.0, 4.0, 0.005
#: Most steps without a look at any sequence, after one that gave none drafts: looks took 2 % of a step of 16 rows.
_MOST_IDLE = 8
#: Time to plan, guess and check the drafts of a sequence on the host, measured on a CPU core with AVX-512.
_HOST_S = 20e-6


class Acceptance:
    """How often the drafts of one sequence were accepted.

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


class DraftBalance:
    """What drafts have lost, by measured steps: the cost curve is of short steps on an idle engine, and may be wrong.

    A step with drafts loses the time that it takes beyond one without, less what its accepted drafts are worth; both in
    steps without drafts. At a loss of one step drafts stop, until steps without them have paid it off, 0.5 % each: then
    they are tried again, so that trials cost no more than that. While all steps have drafts, now and then one is to
    have none, to compare with.

    Attributes:
        has_stopped: There are to be no drafts.
        is_plain_due: The next step that is measured is to have none.
    """

    def __init__(self) -> None:
        self.has_stopped = False
        self.is_plain_due = True
        self._lost = 0.0
        self._plain, self._weight = 1.0, 1.0  # time of a step without drafts, over the curve's
        self._num_left, self._num_between = 0, _FIRST_UNCOMPARED  # steps with drafts until one without is due

    def observe(self, ratio: float, num_drafts: int, worth: float) -> None:
        """Record a step: its time and its tokens, both over those of a step without drafts, by the curve."""
        if self._weight < 1.0:
            ratio = min(ratio, _MAX_RATIO * self._plain)  # another program may have had the processor
        if num_drafts:
            self._lost = max(self._lost + ratio / self._plain - worth, -_MOST_SAVED)
            self.has_stopped = self._lost >= 1.0
            self._num_left -= 1
        else:
            self._plain += self._weight * (ratio - self._plain)
            self._weight = max(self._weight / (1.0 + self._weight), _LAST_WEIGHT)
            self._num_left, self._num_between = self._num_between, min(2 * self._num_between, _MOST_UNCOMPARED)
            self.pay_off()
        self.is_plain_due = self._num_left <= 0

    def pay_off(self) -> None:
        """Count a step without drafts, measured or not, while they have stopped."""
        if self.has_stopped:
            self._lost -= _PAID_OFF
            self.has_stopped = self._lost > 0.0


class CostCurve:
    """Time of a step by its number of rows, piecewise linear between measured points, continued beyond.

    Args:
        points: Rows and seconds, in the order of rows, at least one. A step with more rows than another is taken to be
            no faster.
        draft_s: Time that the proposer needs for one draft, in seconds.
    """

    def __init__(self, points: Seq[tuple[int, float]], draft_s: float = 0.0) -> None:
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
    """Chooses how many drafts make tokens cheaper, from each sequence's acceptance and the cost of further rows.

    With acceptance ``a``, ``k`` drafts are expected to bring ``a + a^2 + ... + a^k`` tokens. Their price is the number
    of tokens that the step would produce in the time that their rows add; prompt tokens count like new ones. A sequence
    gets the ``k`` with the largest surplus, if it exceeds the price by a margin. In a full step, of decodes or of
    prompts, further rows cost as much as the others, so no sequence gets drafts.

    A sequence whose acceptance would be too low even on an idle engine pauses, then gets single drafts until one is
    wrong; pauses double with each failure. New sequences start with the average acceptance of the engine, or with just
    enough for a draft, so that if drafts are always wrong each sequence pays for one.

    Args:
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

    def begin(self, num_rows: int, *, is_greedy: bool = True) -> float:
        """Start a step that computes ``num_rows`` tokens without drafts; ``is_greedy``: all of them at temperature 0.

        ``choose`` follows for each sequence in the order of service. Returns the seconds that it takes without drafts.
        """
        self._is_greedy = is_greedy
        self._cost = self._costs[not is_greedy]
        self._num_rows, self._num_tokens, self._seconds = num_rows, float(num_rows), self._cost(num_rows)
        self._set_prices()
        return self._cost(num_rows)

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
        """Record that the sequence of the last ``choose`` gets ``num_drafts``, at most as many as chosen."""
        self._seconds += self._added_s(num_drafts)
        self._num_rows += num_drafts
        self._num_tokens += sum(acceptance.rate**place for place in range(1, num_drafts + 1))
        self._set_prices()

    def new_acceptance(self) -> Acceptance:
        """State of a new sequence."""
        return Acceptance(max(self._overall.rate, min(*self._least_rates, _PRIOR)))

    def observe(self, acceptance: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Record that ``num_accepted`` of a sequence's ``num_drafts`` were accepted."""
        acceptance.add(num_drafts, num_accepted)
        self._overall.add(num_drafts, num_accepted)

    def _added_s(self, num_drafts: int) -> float:
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
    """A constant number of drafts for all sequences, regardless of cost: for tests and measurements."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts, CostCurve([(1, 1.0)]))

    @override
    def choose(self, acceptance: Acceptance) -> int:
        return self._max_drafts


class Proposer(Protocol):
    """Guesses the next tokens of one sequence, on the engine's thread. One object per sequence that runs.

    The guesses (drafts) become further tokens of the sequence in the same step. The target samples after each of them,
    and a draft counts iff it equals the token sampled at its position, so a guess can be wrong but never changes what
    comes out. ``propose`` is called at most once in a step, and not in steps in which the sequence gets no drafts: the
    next call then finds several new tokens.

    The engine waits while a call runs, for every sequence. Work must be bounded: amortised O(1) per new token, and
    O(``num_drafts``) per call with a small constant (a few microseconds). So must memory: at most a few bytes per
    token. An exception fails the engine, as any defect in the scheduler does.
    """

    def propose(self, tokens: "array[int]", num_drafts: int) -> Seq[int]:
        """Guesses of the tokens that follow ``tokens``: 0 to ``num_drafts``, of which the first may be used alone.

        Args:
            tokens: Prompt and output so far, int32. Must be neither changed nor kept, and no view of it may outlive the
                call. It is that of the last call with new tokens appended: earlier tokens never change, whatever
                happened to drafts, and also after a preemption.
            num_drafts: Most guesses that the step has room for, at least 1.
        """


#: Makes the proposer of a new sequence, given its longest length in tokens.
ProposerFactory = Callable[[int], Proposer]


@dataclass(slots=True)
class _Drafting:
    """Speculation of one sequence; ``num_preemptions`` when it last sampled a token, -1: it never has."""

    acceptance: Acceptance
    proposer: Proposer | None  #: None: on the device
    num_preemptions: int = -1


@dataclass(slots=True)
class _Step:
    """A step in flight: its start, what it takes without drafts by the curve, its rows without drafts; its drafts."""

    start_s: float
    plain_s: float
    num_rows: int
    num_drafts: int = 0
    num_accepted: int = 0


class Speculator:
    """The scheduler's ``DraftSource``: one kind of proposer, a policy for the depth, and counts for metrics.

    Args:
        name: Of the proposer, as requests name it.
        factory: Makes the proposer of a sequence; None: the runner's proposer works on the device.
        balance: Stops drafts that do not pay; None: they go on, and each step looks at every sequence.
        clock_s: Seconds, by which steps are measured for it.

    Attributes:
        num_drafts: Drafts that steps have computed; ``num_accepted`` of them were accepted.
        num_checks: Times that a sequence had drafts in a step.
        skips_masked: Sequences whose tokens a mask filters get no drafts: nobody knows the masks of unknown ones.
    """

    def __init__(
        self,
        name: str,
        depth: AdaptiveDepth,
        factory: ProposerFactory | None = None,
        balance: DraftBalance | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.skips_masked = False
        self._balance = balance
        self._num_idle = self._idle_rows = 0  # steps to come without a look, as long as they have so many rows
        self._clock_s = clock_s
        self._step: _Step | None = None  # none: it computes a prompt too
        self.num_drafts = self.num_accepted = self.num_checks = 0
        self._depth = depth
        self._factory = factory

    @property
    def mean_accepted_len(self) -> float:
        """New tokens per step of a sequence with drafts, from 1; 0 before the first."""
        return 1 + self.num_accepted / self.num_checks if self.num_checks else 0.0

    def propose(self, seqs: Seq[Sequence], num_rows: int, num_left: int) -> list[Sequence]:
        """See ``DraftSource``."""
        if self._num_idle and num_rows == self._idle_rows:
            self._num_idle -= 1
            return []
        self._num_idle, self._idle_rows = 0 if self._balance is None else min(len(seqs) // 2, _MOST_IDLE), num_rows
        depth = self._depth
        plain_s = depth.begin(num_rows, is_greedy=not any(seq.params.temperature for seq in seqs))
        if self._balance is not None:
            self._step = _Step(self._clock_s(), plain_s, num_rows) if num_rows == len(seqs) else None
            if self._balance.has_stopped:
                return []
            if self._balance.is_plain_due and self._step is not None:
                self._num_idle = 0
                return []
        if depth.is_full:
            return []
        drafted = []
        for seq in sorted(seqs, key=attrgetter("rank")):
            if num_left <= 0 or depth.is_full:
                break
            if seq.params.speculation == NO_SPECULATION or (self.skips_masked and seq.matcher is not None):
                continue
            if seq.drafting is None:
                proposer = None if self._factory is None else self._factory(seq.max_len)
                seq.drafting = _Drafting(depth.new_acceptance(), proposer)
            drafting = cast("_Drafting", seq.drafting)
            has_sampled = drafting.num_preemptions == seq.num_preemptions
            drafting.num_preemptions = seq.num_preemptions
            # With all drafts accepted there is one more token.
            most = min(depth.choose(drafting.acceptance), num_left, seq.max_len - len(seq.tokens) - 1)
            if most > 0:
                self._num_idle = 0
            if most <= 0 or (drafting.proposer is None and not has_sampled):
                continue
            if drafting.proposer is None:
                seq.drafts = [UNKNOWN_TOKEN] * most
            else:
                seq.drafts = list(drafting.proposer.propose(seq.tokens, most))
            if seq.drafts:
                depth.add(drafting.acceptance, len(seq.drafts))
                num_left -= len(seq.drafts)
                drafted.append(seq)
        return drafted

    def end_step(self) -> None:
        """See ``DraftSource``."""
        step, self._step = self._step, None
        if self._balance is None:
            return
        if step is None:
            self._balance.pay_off()
        else:
            ratio = (self._clock_s() - step.start_s) / step.plain_s
            self._balance.observe(ratio, step.num_drafts, 1 + step.num_accepted / step.num_rows)

    def observe(self, seq: Sequence, count: int) -> None:
        """See ``DraftSource``."""
        drafting = cast("_Drafting", seq.drafting)
        self._depth.observe(drafting.acceptance, len(seq.drafts), count)
        if self._step is not None:
            self._step.num_drafts += len(seq.drafts)
            self._step.num_accepted += count
        self.num_checks += 1
        self.num_drafts += len(seq.drafts)
        self.num_accepted += count
