"""Decides of every request whether it is let into the router, in O(1) and before any work is done for it."""

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from weft_common.core import CallContext, ParameterValue
from weft_common.errors import WeftError
from weft_router.admission.adaptive import AdaptiveLimit, Outcome
from weft_router.admission.concurrency_limit import LOWEST_LEVEL, ConcurrencyLimit
from weft_router.admission.permit import Permit
from weft_router.admission.refusals import Refusals

#: Level of requests without the parameter ``priority``, so that there is one above.
DEFAULT_LEVEL = 2
#: When there are more, those of graphs and models without a request in flight are forgotten.
MAX_LIMITS = 1024


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What an operator says.

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
        settings: As the operator wants it.
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
        generator: random.Random | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._generator = generator or random.Random()  # noqa: S311  # jitter
        self._clock_ns = clock_ns
        self.router = ConcurrencyLimit(
            "the router", self._generator, limit=settings.max_inflight, setting="--max-inflight", is_timed=False
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
        limit = self.limits.get(name)
        # One that is used is never replaced: of a name whose versions are of both kinds it would limit nothing.
        if limit is None or (limit.is_timed is is_stream and not limit.num_inflight):
            return self._new_gate(kind, name, max_inflight, is_stream)
        if is_stream and limit.is_timed:
            limit.become_stream()
        if limit.maximum != max_inflight:
            limit.set_maximum(max_inflight)
        return limit

    def keep(self, names: Collection[str]) -> None:
        """Gates of other names are gone; requests that are in end at theirs."""
        for name in self.limits.keys() - set(names):
            del self.limits[name]

    def level_of(self, parameters: Mapping[str, ParameterValue]) -> int:
        """Level of a request, 1 to ``LOWEST_LEVEL``; a priority that is none is found out later."""
        priority = parameters.get("priority") if parameters else None
        if type(priority) is not int or priority < 1:
            return self._settings.default_level
        return min(priority, LOWEST_LEVEL)

    def client_of(self, context: CallContext) -> str:
        """Key of who calls; all without one are one client."""
        header = self._settings.client_key_header
        return context.client_key or (context.headers.get(header, "") if header else "")

    def check(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> bool:
        """Whether the request may come in now; if not, it may wait for a place.

        Raises:
            ResourceExhaustedError: A limit is reached; ``retry_after_ms`` says when a place should be free.
            DeadlineExceededError: The deadline has passed, or half of the latest answers took longer than is left.
        """
        now_ns, router = context.arrival_ns, self.router
        router.seen_ns[level] = limit.seen_ns[level] = now_ns
        if limit.is_too_late(context.deadline_ns, now_ns):
            raise self.refusals.too_late(limit, level, now_ns, context)
        if reason := router.why_refused(level, client, now_ns):
            raise self.refusals.full(router, limit, reason, level, context)
        most = self._settings.max_inflight_per_client
        if most and router.num_of(client) >= most:
            raise self.refusals.client_limit(router, limit, level, most, context)
        reason = limit.why_refused(level, client, now_ns)
        if reason and not limit.has_line_for(level, client, reason):
            raise self.refusals.full(limit, limit, reason, level, context)
        return not reason

    def enter(self, limit: ConcurrencyLimit, level: int, client: str, context: CallContext) -> Permit:
        """The request is in, or waits to be, until the block that this is used with is left. Raises as ``check``."""
        now_ns, deadline_ns, router = context.arrival_ns, context.deadline_ns, self.router
        router.seen_ns[level] = limit.seen_ns[level] = now_ns
        permit = Permit(self, limit, level, client, context)
        if (
            2 * router.num_inflight >= router.limit > 0
            or 2 * limit.num_inflight >= limit.limit > 0
            or (deadline_ns is not None and deadline_ns - now_ns <= limit.median_ns)
            or self._settings.max_inflight_per_client
        ) and not self.check(limit, level, client, context):
            permit.stand_in_line()
        else:
            permit.let_in(now_ns)
        router.enter(client, now_ns)
        return permit

    def why_not_let_in(self, permit: Permit) -> WeftError:
        """What is told to who has waited in vain."""
        limit, context, now_ns = permit.limit, permit.context, self._clock_ns()
        if limit.is_too_late(context.deadline_ns, now_ns):
            return self.refusals.too_late(limit, permit.level, now_ns, context)
        return self.refusals.full(limit, limit, "waited", permit.level, context)

    def max_wait_s(self, permit: Permit) -> float:
        """How long a request may wait in line from now on."""
        deadline_ns, most_s = permit.context.deadline_ns, permit.limit.max_wait_s
        return most_s if deadline_ns is None else min(most_s, (deadline_ns - self._clock_ns()) / 1e9)

    def left(self, permit: Permit, outcome: Outcome) -> None:
        """A permit is over; who waits may come in."""
        now_ns = self._clock_ns()
        limit, client = permit.limit, permit.client
        self.router.leave(client, now_ns - permit.context.arrival_ns, now_ns, outcome)
        if permit.start_ns:
            limit.leave(client, now_ns - permit.start_ns, now_ns, outcome)
        if limit.line:
            self._let_in(limit, now_ns)

    def _let_in(self, limit: ConcurrencyLimit, now_ns: int) -> None:
        """Whoever waits comes in while there are places; who cannot be answered in time any more is refused."""
        while (waiting := limit.line.next()) is not None and limit.num_places(waiting[0], now_ns) > 0:
            level, permit = waiting
            limit.line.remove(level, permit)
            if limit.is_too_late(permit.context.deadline_ns, now_ns):
                permit.refuse(self.refusals.too_late(limit, level, now_ns, permit.context))
            else:
                permit.let_in(now_ns)

    def _new_gate(self, kind: str, name: str, max_inflight: int, is_stream: bool) -> ConcurrencyLimit:
        if len(self.limits) >= MAX_LIMITS:
            self.limits = {name: limit for name, limit in self.limits.items() if limit.num_inflight}
        limit = self.limits[name] = ConcurrencyLimit(
            f"{kind} '{name}'",
            self._generator,
            limit=max_inflight,
            setting="'max_inflight' of the graph's policy",
            adaptive=AdaptiveLimit() if self._settings.is_adaptive and not is_stream else None,
            is_timed=not is_stream,
        )
        return limit
