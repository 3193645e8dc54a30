"""``priority_levels``, the default: Triton Inference Server's priority levels, and ageing between them."""

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import ClassVar

from typing_extensions import override

from weft.base.statistics import MAX_COUNTED_LEVEL
from weft.serving.queues.queue import PolicyQueue, Waiting, check_room
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceRequest

#: Empty levels that are kept for their next request. Clients choose the level, so their number is bounded.
_MAX_IDLE_LEVELS = 16

_rank = attrgetter("rank_ns")


class _Level:
    """Requests of one priority: those in time, then those that a DELAY policy put behind them, each FIFO."""

    __slots__ = ("delayed", "num_rows", "policy", "waiting")

    def __init__(self, policy: WaitPolicy) -> None:
        self.policy = policy
        self.num_rows = 0
        # OrderedDict: removing any entry and reading the first are both O(1), which dict is not after many removals.
        self.waiting: OrderedDict[InferenceRequest, None] = OrderedDict()
        self.delayed: OrderedDict[InferenceRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class _LevelRange:
    """Requests of the levels ``best`` to ``worst`` of a queue, in the order of service without ageing."""

    def __init__(self, levels: Mapping[int, _Level], order: Sequence[int], best: int, worst: int) -> None:
        self._levels = levels
        self._order = order
        self._best = best
        self._worst = worst

    def __len__(self) -> int:
        return sum(len(level) for number, level in self._levels.items() if self._best <= number <= self._worst)

    def __iter__(self) -> Iterator[InferenceRequest]:
        for number in self._order:
            if self._best <= number <= self._worst:
                yield from self._levels[number].waiting
                yield from self._levels[number].delayed


class PriorityQueue(PolicyQueue):
    """Requests by level, first in first out within one.

    With ageing, a request of level n is served like one of level 1 that came ``(n - 1) * priority_aging_us`` later. So
    the order of two requests never changes while they wait, and none is overtaken for ever. A request that a DELAY
    policy puts back starts again then, one level lower.

    Adding, removing and expiring a request cost O(log n) at most.
    """

    has_levels: ClassVar[bool] = True

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._aging_ns = settings.priority_aging_us * 1000
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # keys of _levels, sorted

    @override
    def __iter__(self) -> Iterator[InferenceRequest]:
        if len(self._order) == 1 and not (level := self._levels[self._order[0]]).delayed:
            return iter(level.waiting)
        lines: list[OrderedDict[InferenceRequest, None]] = []
        for number in self._order:
            level = self._levels[number]
            lines += (level.waiting, level.delayed) if level.delayed else (level.waiting,)
        return heapq.merge(*lines, key=_rank) if self._aging_ns and len(lines) > 1 else chain.from_iterable(lines)

    @override
    def apart(self, level: int) -> tuple[Waiting, Waiting]:
        return (
            _LevelRange(self._levels, self._order, 0, level - 1),
            _LevelRange(self._levels, self._order, level, level),
        )

    @override
    def overtakes(self, request: InferenceRequest, other: InferenceRequest) -> bool:
        """Whether it has a better level; with ageing, whether it is ahead by at least ``priority_aging_us``."""
        if self._aging_ns:
            return other.rank_ns - request.rank_ns >= self._aging_ns
        return request.priority < other.priority

    @override
    def limit_for(self, request: InferenceRequest) -> int:
        return self._settings.policy_of(self._settings.level_of(request.priority)).max_queue_size

    @override
    def num_rows_before(self, request: InferenceRequest) -> int:
        """Rows of its level and better ones, ignoring ageing."""
        number = self._settings.level_of(request.priority)
        return sum(self._levels[other].num_rows for other in self._order[: bisect_right(self._order, number)])

    @override
    def num_by_level(self) -> dict[int, int]:
        """Waiting requests by level; levels above ``MAX_COUNTED_LEVEL`` are counted there."""
        counts: dict[int, int] = {}
        for number, level in list(self._levels.items()):
            counted = min(number, MAX_COUNTED_LEVEL)
            counts[counted] = counts.get(counted, 0) + len(level)
        return counts

    @override
    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:  # as inherited, without a call for each
        levels, expiries = self._levels, self._expiries
        for request in requests:
            level = levels[request.priority]
            del (level.waiting if request in level.waiting else level.delayed)[request]
            level.num_rows -= request.num_rows
            if expiries.requests:
                expiries.discard(request)
            self.num_waiting -= 1
            request.start_ns = now_ns
            if len(self._order) > _MAX_IDLE_LEVELS:
                self._forget_if_idle(request.priority, level)

    @override
    def _insert(self, request: InferenceRequest) -> WaitPolicy:
        settings = self._settings
        number = settings.level_of(request.priority) if settings.priority_levels else 0
        level = self._levels.get(number)
        policy = level.policy if level is not None else settings.policy_of(number)
        if policy.max_queue_size:
            where = f" at priority level {number}" if number else ""
            check_room(policy, 0 if level is None else len(level), where)
        if level is None:
            level = self._levels[number] = _Level(policy)
            insort(self._order, number)
        request.priority = number
        if self._aging_ns:
            request.rank_ns = request.enqueue_ns + (number - 1) * self._aging_ns
        level.waiting[request] = None
        level.num_rows += request.num_rows
        return policy

    @override
    def _discard(self, request: InferenceRequest) -> bool:
        level = self._levels.get(request.priority)
        if level is None:
            return False
        if request in level.waiting:
            del level.waiting[request]
        elif request in level.delayed:
            del level.delayed[request]
        else:
            return False
        level.num_rows -= request.num_rows
        if len(self._order) > _MAX_IDLE_LEVELS:
            self._forget_if_idle(request.priority, level)
        return True

    def _forget_if_idle(self, number: int, level: _Level) -> None:
        if not len(level):
            self._order.remove(number)
            del self._levels[number]

    @override
    def _policy_of(self, request: InferenceRequest) -> WaitPolicy:
        return self._levels[request.priority].policy

    @override
    def _put_back(self, request: InferenceRequest, now_ns: int) -> None:
        level = self._levels[request.priority]
        del level.waiting[request]
        level.delayed[request] = None
        request.rank_ns = now_ns + request.priority * self._aging_ns

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        num_rows = sum(level.num_rows for level in self._levels.values())
        if num_rows != sum(request.num_rows for request in self) or self._order != sorted(self._levels):
            raise AssertionError(f"{num_rows=} {self._order=} {list(self)=}")
