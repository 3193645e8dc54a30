"""Metrics of a stream."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weft.jobs.brokers.broker import Message


class StreamMetrics:
    """Counters of a stream in a registry of its own.

    Attributes:
        registry: What is served on the metrics port.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._received = Counter("weft_stream_received_total", "Messages received", registry=self.registry)
        self._again = Counter(
            "weft_stream_redelivered_total", "Messages received that had been delivered before", registry=self.registry
        )
        self._done = Counter(
            "weft_stream_messages_total", "Messages acknowledged, by outcome", ["outcome"], registry=self.registry
        )
        self._lag = Gauge("weft_stream_lag_messages", "Messages not acknowledged; NaN: unknown", registry=self.registry)
        self._inflight = Gauge("weft_stream_inflight_messages", "Messages in work", registry=self.registry)
        self._seconds = Histogram(
            "weft_stream_request_seconds", "From the start of a request to its acknowledgement", registry=self.registry
        )
        for outcome in ("answered", "dead"):
            self._done.labels(outcome)

    def received(self, messages: Sequence[Message]) -> None:
        """Messages came."""
        self._received.inc(len(messages))
        self._again.inc(sum(message.num_deliveries > 1 for message in messages))

    def answered(self, num_answered: int, num_dead: int, duration_s: float) -> None:
        """Messages were acknowledged."""
        self._done.labels("answered").inc(num_answered)
        self._done.labels("dead").inc(num_dead)
        self._seconds.observe(duration_s)

    def observe_lag(self, num_messages: int | None, num_inflight: int) -> None:
        """What is left to do; None: the broker does not say."""
        self._lag.set(float("nan") if num_messages is None else num_messages)
        self._inflight.set(num_inflight)
