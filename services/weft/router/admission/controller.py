"""Decides in O(1) whether the router admits, queues or refuses a request, before any work is done for it.

::

    AdmissionController    of the router: admits, queues or refuses every request
      ConcurrencyLimit     of the router, of a graph; keeps slots for higher priorities and for other clients
        AdaptiveLimit      derives the limit from latency
        RetrySlots         computes ``retry-after-ms``
        WaitingQueue       requests that wait for a slot
      Permit               an admitted or queued request
    InflightLimit          the plain limit of a node or step

Policy only: no gRPC, no event loop; the clock is passed in.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType

from opentelemetry.trace import get_current_span

from weft.base.core import CallContext, ParameterValue
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.base.limits import AdaptiveLimit, Outcome, divided, share
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.router.admission.concurrency_limit import LOWEST_LEVEL, ConcurrencyLimit

#: Level of requests without the parameter ``priority``, so that there is one above.
DEFAULT_LEVEL = 2
#: When there are more, those of graphs and models without a request in flight are forgotten.
MAX_LIMITS = 1024
#: Refusals of this time share one line in the log.
_LOG_PERIOD_NS = 1_000_000_000

_log = get_logger("weft.router.admission")


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The operator's settings.

    Attributes:
        max_inflight: Requests in the router at once; 0 means no limit.
        is_adaptive: Whether each graph, and each model called by its name, has a limit that follows its latency.
        max_inflight_per_client: Requests of one client key at once; 0 means no limit.
        client_key_header: Header that identifies unauthenticated clients; "": they count as one.
        default_level: Of requests without the parameter ``priority``, 1 is the highest.
    """

    max_inflight: int = 0
    is_adaptive: bool = False
    max_inflight_per_client: int = 0
    client_key_header: str = ""
    default_level: int = DEFAULT_LEVEL


class AdmissionController:
    """All limits of a router: its own, those of its graphs and of its clients.

    Args:
        num_workers: Routers behind one port that share these limits; each gets an equal part.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        *,
        num_workers: int = 1,
        generator: random.Random | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._num_workers = num_workers
        self._max_inflight_per_client = share(settings.max_inflight_per_client, num_workers)
        self._generator = generator or random.Random()  # noqa: S311  # jitter
        self.clock_ns = clock_ns
        self.router = ConcurrencyLimit(
            "the router",
            self._generator,
            limit=share(settings.max_inflight, num_workers),
            setting=f"--max-inflight{divided(num_workers)}",
            is_timed=False,
        )
        self.limits: dict[str, ConcurrencyLimit] = {}
        self._num_unlogged = 0
        self._logged_ns = -_LOG_PERIOD_NS

    def limit(self, kind: str, name: str, max_inflight: int = 0, *, is_stream: bool = False) -> ConcurrencyLimit:
        """The limit of a graph or model, created on first use.

        Args:
            max_inflight: Current value from its policy; 0 means no limit.
            is_stream: It is decoupled.
        """
        max_inflight = share(max_inflight, self._num_workers)
        limit = self.limits.get(name)
        # A limit in use is never replaced: a name may have versions that stream and versions that do not.
        if limit is None or (limit.is_timed is is_stream and not limit.num_inflight):
            if len(self.limits) >= MAX_LIMITS:
                self.limits = {name: limit for name, limit in self.limits.items() if limit.num_inflight}
            limit = self.limits[name] = ConcurrencyLimit(
                f"{kind} '{name}'",
                self._generator,
                limit=max_inflight,
                setting=f"'max_inflight' of the graph's policy{divided(self._num_workers)}",
                adaptive=AdaptiveLimit() if self._settings.is_adaptive and not is_stream else None,
                is_timed=not is_stream,
            )
            return limit
        if is_stream and limit.is_timed:
            limit.become_stream()
        if limit.maximum != max_inflight:
            limit.set_maximum(max_inflight)
        return limit

    def keep(self, names: Collection[str]) -> None:
        """Drop the limits of all other names; admitted requests still end at theirs."""
        for name in self.limits.keys() - set(names):
            del self.limits[name]

    def level_of(self, priority: int) -> int:
        """Level of a request, 1 to ``LOWEST_LEVEL``, by its priority; 0 is the default."""
        return min(priority, LOWEST_LEVEL) if priority else self._settings.default_level

    def client_of(self, context: CallContext) -> str:
        """Key of the client; clients without one share a key."""
        header = self._settings.client_key_header
        return context.client_key or (context.headers.get(header, "") if header else "")

    def is_crowded(self, limit: ConcurrencyLimit) -> bool:
        """Whether half of this limit, or of the router's, is in flight, from where on requests may be refused."""
        router = self.router
        return 2 * router.num_inflight >= router.limit > 0 or 2 * limit.num_inflight >= limit.limit > 0

    def check(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> bool:
        """Return whether the request may be admitted now; False: it may wait for a slot.

        Raises:
            ResourceExhaustedError: A limit is reached; ``retry_after_ms`` says when a slot should be free.
            DeadlineExceededError: The deadline has passed, or leaves less time than half of the latest answers took.
        """
        now_ns, router = context.arrival_ns, self.router
        router.seen_ns[level] = limit.seen_ns[level] = now_ns
        if limit.is_too_late(context.deadline_ns, now_ns):
            raise self.too_late(limit, level, now_ns, context)
        if reason := router.why_refused(level, client, now_ns):
            raise self.full(router, limit, reason, level, context)
        most = self._max_inflight_per_client
        if most and router.num_of(client) >= most:
            self._count_refusal(limit, "client_limit", level, context)
            how = divided(self._num_workers)
            text = f"the client has {most} requests in flight, as many as --max-inflight-per-client{how} allows"
            raise _exhausted(text, router, context)
        reason = limit.why_refused(level, client, now_ns)
        if reason and not limit.may_wait(level, client, reason):
            raise self.full(limit, limit, reason, level, context)
        return not reason

    def admit(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> "Permit":
        """Admit or queue the request until the end of the permit's ``with`` block. Raises like ``check``."""
        now_ns, deadline_ns, router = context.arrival_ns, context.deadline_ns, self.router
        router.seen_ns[level] = limit.seen_ns[level] = now_ns
        if (
            2 * router.num_inflight >= router.limit > 0
            or 2 * limit.num_inflight >= limit.limit > 0
            or (deadline_ns is not None and deadline_ns - now_ns <= limit.median_ns)
            or self._max_inflight_per_client
        ) and not self.check(limit, level, client, context):
            permit = Permit(self, limit, level, client, context)
            permit.enqueue()
        else:
            permit = Permit(self, limit, level, client, context, now_ns)
            limit.enter(client, now_ns)
        router.enter(client, now_ns)
        return permit

    def release(self, permit: "Permit", outcome: Outcome) -> None:
        """End a permit; admit waiting requests in its place, and refuse those with too little time left."""
        now_ns = self.clock_ns()
        limit, client = permit.limit, permit.client
        self.router.leave(client, now_ns - permit.context.arrival_ns, now_ns, outcome)
        if permit.start_ns:
            limit.leave(client, now_ns - permit.start_ns, now_ns, outcome)
        if not limit.queue.num_waiting:
            return
        while (waiting := limit.queue.next()) is not None and limit.num_slots(waiting[0], now_ns) > 0:
            level, waiter = waiting
            limit.queue.remove(level, waiter)
            if limit.is_too_late(waiter.context.deadline_ns, now_ns):
                waiter.decide(self.too_late(limit, level, now_ns, waiter.context))
            else:
                waiter.start_ns = now_ns
                limit.enter(waiter.client, now_ns)
                waiter.decide(None)

    def too_late(self, limit: ConcurrencyLimit, level: int, now_ns: int, context: CallContext) -> WeftError:
        """Count and return the error for a request that cannot be answered within its deadline."""
        self._count_refusal(limit, "deadline", level, context)
        left_ns = (context.deadline_ns or 0) - now_ns
        if left_ns <= 0:
            return DeadlineExceededError("the deadline had passed before any work was done").refused()
        return DeadlineExceededError(
            f"{limit.subject} cannot answer inside the deadline: {left_ns / 1e6:.1f} ms are left, and half of its "
            f"latest answers took more than {limit.median_ns / 1e6:.1f} ms; allow more time, or send it when less is "
            "in flight"
        ).refused()

    def full(
        self, full: ConcurrencyLimit, limit: ConcurrencyLimit, reason: str, level: int, context: CallContext
    ) -> WeftError:
        """Count and return the error for a request to ``limit`` that ``full`` has no slot for.

        Args:
            reason: One of ``ConcurrencyLimit.why_refused``, or ``waited``.
        """
        self._count_refusal(limit, reason, level, context)
        why = {
            "priority": f", of which some are kept for priorities above {level}",
            "client_share": ", of which this client has its share",
            "waited": "; no place became free in time",
        }.get(reason, "")
        text = f"{full.subject} has {full.num_inflight} requests in flight, and {full.setting} allows {full.limit}{why}"
        return _exhausted(text, full, context)

    def _count_refusal(self, limit: ConcurrencyLimit, reason: str, level: int, context: CallContext) -> None:
        key = (reason, level)
        limit.refusals[key] = limit.refusals.get(key, 0) + 1
        if telemetry.is_enabled():
            span = get_current_span(context.trace_context)
            span.set_attributes({"weft.refusal": reason, "weft.priority": level, "weft.limit": limit.limit})
        now_ns = context.arrival_ns
        self._num_unlogged += 1
        if now_ns - self._logged_ns < _LOG_PERIOD_NS:
            return
        extra = {
            "num_refused": self._num_unlogged,
            "subject": limit.subject,
            "reason": reason,
            "priority": level,
            "num_inflight": limit.num_inflight,
            "limit": limit.limit,
        }
        _log.warning("requests are refused; the fields are of the latest", extra=extra)
        self._num_unlogged, self._logged_ns = 0, now_ns


def _exhausted(text: str, full: ConcurrencyLimit, context: CallContext) -> WeftError:
    retry_after_ms = full.slots.retry_after_ms(context.arrival_ns)
    text += f"; try again in {retry_after_ms} ms"
    return ResourceExhaustedError(text, retry_after_ms=retry_after_ms).refused()


class Permit:
    """An admitted or queued request; the end of its ``with`` block frees its slot.

    Args:
        start_ns: When it was admitted; 0 if it is to be queued.

    Attributes:
        is_waiting: Whether ``wait`` must be called.
    """

    __slots__ = ("_admission", "_decision", "client", "context", "is_waiting", "level", "limit", "start_ns")

    def __init__(
        self,
        admission: AdmissionController,
        limit: ConcurrencyLimit,
        level: int,
        client: str,
        context: CallContext,
        start_ns: int = 0,
    ) -> None:
        self._admission = admission
        self.limit, self.level, self.client, self.context = limit, level, client, context
        self.start_ns = start_ns
        self.is_waiting = False
        self._decision: asyncio.Future[WeftError | None] | None = None

    def enqueue(self) -> None:
        """Queue the request; if the queue is full, drop the last one of a lower level."""
        limit, level = self.limit, self.level
        queue = limit.queue
        if queue.num_waiting >= limit.max_waiting and (last := queue.last_below(level)) is not None:
            other_level, other = last
            queue.remove(other_level, other)
            other.decide(self._admission.full(limit, limit, "priority", other_level, other.context))
        self.is_waiting = True
        self._decision = asyncio.get_running_loop().create_future()
        queue.add(level, self)

    def decide(self, error: WeftError | None) -> None:
        """Admit a queued request, or refuse it with ``error``."""
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(error)

    async def wait(self) -> None:
        """Wait until the queued request is admitted.

        Raises:
            ResourceExhaustedError: No slot became free in time, or a request of a higher level took it.
            DeadlineExceededError: Too little time is left.
        """
        if self._decision is None:
            return
        admission, limit, deadline_ns = self._admission, self.limit, self.context.deadline_ns
        most_s = limit.max_wait_s
        if deadline_ns is not None:
            most_s = min(most_s, (deadline_ns - admission.clock_ns()) / 1e9)
        try:
            async with asyncio.timeout(most_s):
                error = await self._decision
        except TimeoutError:
            now_ns = admission.clock_ns()
            if limit.is_too_late(deadline_ns, now_ns):
                raise admission.too_late(limit, self.level, now_ns, self.context) from None
            raise admission.full(limit, limit, "waited", self.level, self.context) from None
        if error is not None:
            raise error

    def __enter__(self) -> "Permit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_waiting:
            self.limit.queue.remove(self.level, self)
        self._admission.release(self, Outcome.ANSWERED if error is None else outcome_of(error))


def outcome_of(error: BaseException) -> Outcome:
    """Classify the error of a request by what it says about load."""
    if isinstance(error, WeftError):
        if error.code == "RESOURCE_EXHAUSTED":
            return Outcome.REFUSED
        return Outcome.WITHDRAWN if error.code in ("DEADLINE_EXCEEDED", "CANCELLED") else Outcome.FAILED
    is_withdrawn = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return Outcome.WITHDRAWN if is_withdrawn else Outcome.FAILED


def admissible_priority(parameters: Mapping[str, ParameterValue]) -> int:
    """Request priority; 0 if the parameter is malformed (validation rejects it later)."""
    priority = parameters.get("priority")
    return priority if type(priority) is int and priority > 0 else 0
