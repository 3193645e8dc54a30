"""Decides in O(1) whether a request is admitted to the router, before any work is done for it."""

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from weft.base.adaptive_limit import AdaptiveLimit, Outcome
from weft.base.core import CallContext, ParameterValue
from weft.base.errors import WeftError
from weft.base.limits import divided, share
from weft.router.admission.concurrency_limit import LOWEST_LEVEL, ConcurrencyLimit
from weft.router.admission.permit import Permit
from weft.router.admission.refusals import Refusals

#: Level of requests without the parameter ``priority``, so that there is one above.
DEFAULT_LEVEL = 2
#: When there are more, those of graphs and models without a request in flight are forgotten.
MAX_LIMITS = 1024


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What the operator has set.

    Attributes:
        max_inflight: Requests in the router at once; 0 means no limit.
        is_adaptive: Whether each graph, and each model called by its name, has a limit that follows its latency.
        max_inflight_per_client: Requests of one client key at once; 0 means no limit.
        client_key_header: Tells clients apart that are not authenticated; "": they are one.
        default_level: Of requests without the parameter ``priority``, 1 is the highest.
    """

    max_inflight: int = 0
    is_adaptive: bool = False
    max_inflight_per_client: int = 0
    client_key_header: str = ""
    default_level: int = DEFAULT_LEVEL


class AdmissionController:
    """The limits of a router: its own, those of its graphs, those of its clients.

    Args:
        settings: As the operator has set them.
        num_workers: How many routers share these limits, behind one port; each has its part of them.
        generator: Draws the jitter of ``retry_after_ms``.
        clock_ns: ``time.monotonic_ns`` except in tests.

    Attributes:
        router: Limit of all requests together.
        limits: Of graphs and models, by name.
        refusals: Makes the errors.
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
        self._clock_ns = clock_ns
        self.router = ConcurrencyLimit(
            "the router",
            self._generator,
            limit=share(settings.max_inflight, num_workers),
            setting=f"--max-inflight{divided(num_workers)}",
            is_timed=False,
        )
        self.limits: dict[str, ConcurrencyLimit] = {}
        self.refusals = Refusals()

    def limit(self, kind: str, name: str, max_inflight: int = 0, *, is_stream: bool = False) -> ConcurrencyLimit:
        """The limit of a graph or model that there is.

        Args:
            kind: ``graph`` or ``model``.
            name: Its name.
            max_inflight: As its policy has it now; 0 means no limit.
            is_stream: It is decoupled.
        """
        max_inflight = share(max_inflight, self._num_workers)
        limit = self.limits.get(name)
        # A limit in use is never replaced: a name may have versions that stream and versions that do not.
        if limit is None or (limit.is_timed is is_stream and not limit.num_inflight):
            return self._new_limit(kind, name, max_inflight, is_stream)
        if is_stream and limit.is_timed:
            limit.become_stream()
        if limit.maximum != max_inflight:
            limit.set_maximum(max_inflight)
        return limit

    def keep(self, names: Collection[str]) -> None:
        """Limits of other names are gone; requests that were admitted end at theirs."""
        for name in self.limits.keys() - set(names):
            del self.limits[name]

    def level_of(self, priority: int) -> int:
        """Level of a request, 1 to ``LOWEST_LEVEL``, by its priority; 0 is the default."""
        return min(priority, LOWEST_LEVEL) if priority else self._settings.default_level

    def client_of(self, context: CallContext) -> str:
        """Key of the client; all without one are one client."""
        header = self._settings.client_key_header
        return context.client_key or (context.headers.get(header, "") if header else "")

    def is_crowded(self, limit: ConcurrencyLimit) -> bool:
        """Whether half of this limit, or of the router's, is in flight: from here on requests may be refused."""
        router = self.router
        return 2 * router.num_inflight >= router.limit > 0 or 2 * limit.num_inflight >= limit.limit > 0

    def check(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> bool:
        """Whether the request may be admitted now; if not, it may wait for a slot.

        Raises:
            ResourceExhaustedError: A limit is reached; ``retry_after_ms`` says when a slot should be free.
            DeadlineExceededError: The deadline has passed, or half of the latest answers took longer than is left.
        """
        now_ns, router = context.arrival_ns, self.router
        router.seen_ns[level] = limit.seen_ns[level] = now_ns
        if limit.is_too_late(context.deadline_ns, now_ns):
            raise self.refusals.too_late(limit, level, now_ns, context)
        if reason := router.why_refused(level, client, now_ns):
            raise self.refusals.full(router, limit, reason, level, context)
        most = self._max_inflight_per_client
        if most and router.num_of(client) >= most:
            raise self.refusals.client_limit(router, limit, level, most, context, divided(self._num_workers))
        reason = limit.why_refused(level, client, now_ns)
        if reason and not limit.may_wait(level, client, reason):
            raise self.refusals.full(limit, limit, reason, level, context)
        return not reason

    def admit(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> Permit:
        """The request is admitted, or queued, until the end of the permit's ``with`` block. Raises as ``check``."""
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

    def timed_out(self, permit: Permit) -> WeftError:
        """Error for a request that timed out in the queue."""
        limit, context, now_ns = permit.limit, permit.context, self._clock_ns()
        if limit.is_too_late(context.deadline_ns, now_ns):
            return self.refusals.too_late(limit, permit.level, now_ns, context)
        return self.refusals.full(limit, limit, "waited", permit.level, context)

    def max_wait_s(self, permit: Permit) -> float:
        """How long a request may wait in the queue from now on."""
        deadline_ns, most_s = permit.context.deadline_ns, permit.limit.max_wait_s
        return most_s if deadline_ns is None else min(most_s, (deadline_ns - self._clock_ns()) / 1e9)

    def release(self, permit: Permit, outcome: Outcome) -> None:
        """A permit is over; requests that wait are admitted in its place."""
        now_ns = self._clock_ns()
        limit, client = permit.limit, permit.client
        self.router.leave(client, now_ns - permit.context.arrival_ns, now_ns, outcome)
        if permit.start_ns:
            limit.leave(client, now_ns - permit.start_ns, now_ns, outcome)
        if limit.queue.num_waiting:
            self._admit_waiting(limit, now_ns)

    def _admit_waiting(self, limit: ConcurrencyLimit, now_ns: int) -> None:
        """Requests in the queue are admitted while there are slots, or refused where there is no time left for them."""
        while (waiting := limit.queue.next()) is not None and limit.num_slots(waiting[0], now_ns) > 0:
            level, permit = waiting
            limit.queue.remove(level, permit)
            if limit.is_too_late(permit.context.deadline_ns, now_ns):
                permit.refuse(self.refusals.too_late(limit, level, now_ns, permit.context))
            else:
                permit.admit(now_ns)

    def _new_limit(self, kind: str, name: str, max_inflight: int, is_stream: bool) -> ConcurrencyLimit:
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


def admissible_priority(parameters: Mapping[str, ParameterValue]) -> int:
    """The parameter ``priority``; 0 for one that is none, which is refused when the request is validated."""
    priority = parameters.get("priority")
    return priority if type(priority) is int and priority > 0 else 0
