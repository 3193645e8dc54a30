"""State shared by all graphs of a router: clock, random numbers, targets, retry budgets, background tasks."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.base.cancellation import cancel_and_wait
from weft.base.limits import divided, share
from weft.language.plan import CallPlan
from weft.router.admission.concurrency_limit import InflightLimit
from weft.router.bandits.store import BanditStore
from weft.router.reporting.counters import StepCounterTable
from weft.router.rollouts.store import RolloutStore
from weft.router.target import RetryBudget, Target

#: Copies of all graphs together; each holds the tensors that it is made of.
MAX_SHADOWS = 1024
#: Pause between requests whose models are asked for times, as long as they keep coming: each call costs 15 us more.
_TIMES_EVERY_NS, _TIMES_BURST_NS = 50_000_000, 2_500_000_000


class ShadowPool:
    """Background tasks, cancelled when the router closes."""

    def __init__(self, max_inflight: int = MAX_SHADOWS) -> None:
        self._max_inflight = max_inflight
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether another task may start; never after ``close``."""
        return not self._is_closed and len(self._tasks) < self._max_inflight

    @property
    def num_inflight(self) -> int:
        """Number of running tasks."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Run ``work``, which raises nothing, as a task; ``on_end`` is called however it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(on_end)

    async def close(self) -> None:
        """Cancel all tasks and await them; none starts any more."""
        self._is_closed = True
        await cancel_and_wait(list(self._tasks))


@dataclass(slots=True)
class Runtime:
    """Clock, random numbers, targets and budgets: everything outside the plan that a step may use. One per router.

    Attributes:
        clock_ns: Measures deadlines; ``time.monotonic_ns`` except in tests.
        generator: For splitters without a key, shadows, and the jitter between attempts.
        budgets: Retry budget of each target, shared by all graphs.
        node_budget: Retry budget of runs of nodes.
        is_busy: Whether the router is too busy to start shadows.
        on_end: Told each request of a graph that ends: plan, run, path, start, error; None while nobody looks.
        target_of: Answers the steps in place of ``targets``, by path and call.
        num_workers: Number of routers, this one included, that share a port and the limits of graphs.
    """

    targets: Mapping[str, Target]
    clock_ns: Callable[[], int] = time.monotonic_ns
    generator: random.Random = field(default_factory=random.Random)
    budgets: Mapping[str, RetryBudget] = field(default_factory=dict)
    node_budget: RetryBudget = field(default_factory=RetryBudget)
    shadows: ShadowPool = field(default_factory=ShadowPool)
    is_busy: Callable[[], bool] = lambda: False
    is_pinning_allowed: bool = False
    step_counters: StepCounterTable = field(default_factory=StepCounterTable)
    bandits: BanditStore = field(default_factory=BanditStore)
    on_end: Callable[[Any, Any, str, int, BaseException | None], None] | None = None
    rollouts: RolloutStore = field(default_factory=RolloutStore)
    num_workers: int = 1
    target_of: Callable[[str, CallPlan], Target] | None = None
    _timed_ns: int = 0

    def takes_times(self, now_ns: int) -> bool:
        """Whether a request that somebody looks at asks models for their times: 20 a second do, after 50 at once."""
        is_due = self._timed_ns < now_ns
        if is_due:
            self._timed_ns = max(self._timed_ns, now_ns - _TIMES_BURST_NS) + _TIMES_EVERY_NS
        return is_due

    def inflight_limit(self, subject: str, limit: int) -> InflightLimit:
        """A limit with this router's part of a ``max_inflight`` in a graph."""
        setting = f"'max_inflight' of its policy{divided(self.num_workers)}"
        return InflightLimit(subject, self.share(limit), setting)

    def share(self, limit: int) -> int:
        """This router's part of a limit."""
        return share(limit, self.num_workers)

    def retry_budget(self, target: str) -> RetryBudget:
        """Retry budget of the target, or of nodes if no target has that name."""
        return self.budgets.get(target, self.node_budget)

    async def close(self) -> None:
        """Stop all background copies."""
        await self.shadows.close()
