"""The refusal of a request: its error, its span, its log line and its counter."""

from opentelemetry.trace import get_current_span

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.router.admission.concurrency_limit import ConcurrencyLimit

#: Refusals of this time share one line in the log.
_LOG_PERIOD_NS = 1_000_000_000

_log = get_logger("weft.router.admission")


class Refusals:
    """Makes the errors of requests that are not admitted; each is counted at the limit of its graph."""

    def __init__(self) -> None:
        self._num_untold = 0
        self._told_ns = -_LOG_PERIOD_NS

    def too_late(self, limit: ConcurrencyLimit, level: int, now_ns: int, context: CallContext) -> WeftError:
        """Error for a request that cannot be answered within its deadline."""
        self._count(limit, "deadline", level, context)
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
        """``full`` has no slot for a request of ``limit``; the reason is one of ``why_refused``, or ``waited``."""
        self._count(limit, reason, level, context)
        why = {
            "priority": f", of which some are kept for priorities above {level}",
            "client_share": ", of which this client has its share",
            "waited": "; no place became free in time",
        }.get(reason, "")
        text = f"{full.subject} has {full.num_inflight} requests in flight, and {full.setting} allows {full.limit}{why}"
        return self._exhausted(text, full, context)

    def client_limit(
        self,
        router: ConcurrencyLimit,
        limit: ConcurrencyLimit,
        level: int,
        most: int,
        context: CallContext,
        how: str = "",
    ) -> WeftError:
        """Error for a client that has as many requests in flight as it may; ``how`` the limit was divided."""
        self._count(limit, "client_limit", level, context)
        text = f"the client has {most} requests in flight, as many as --max-inflight-per-client{how} allows"
        return self._exhausted(text, router, context)

    def _exhausted(self, text: str, full: ConcurrencyLimit, context: CallContext) -> WeftError:
        retry_after_ms = full.slots.retry_after_ms(context.arrival_ns)
        text += f"; try again in {retry_after_ms} ms"
        return ResourceExhaustedError(text, retry_after_ms=retry_after_ms).refused()

    def _count(self, limit: ConcurrencyLimit, reason: str, level: int, context: CallContext) -> None:
        key = (reason, level)
        limit.refusals[key] = limit.refusals.get(key, 0) + 1
        if telemetry.is_enabled():
            span = get_current_span(context.trace_context)
            span.set_attributes({"weft.refusal": reason, "weft.priority": level, "weft.limit": limit.limit})
        now_ns = context.arrival_ns
        self._num_untold += 1
        if now_ns - self._told_ns < _LOG_PERIOD_NS:
            return
        extra = {
            "num_refused": self._num_untold,
            "subject": limit.subject,
            "reason": reason,
            "priority": level,
            "num_inflight": limit.num_inflight,
            "limit": limit.limit,
        }
        _log.warning("requests are refused; the fields are of the latest", extra=extra)
        self._num_untold, self._told_ns = 0, now_ns
