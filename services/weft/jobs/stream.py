"""``weft stream``: messages from a broker through a graph, and their answers to a broker: ``MessageStream``."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from weft.base.core import Parameters
from weft.base.errors import InvalidArgumentError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.jobs.brokers import Address, Broker, Message, Publication
from weft.jobs.dataset import Shard
from weft.jobs.layout import ROW, Layout, make_layout
from weft.jobs.output import FailedRow
from weft.jobs.shard import run_shard
from weft.jobs.target import JobTarget
from weft.v2.client.v2_client import V2Client

#: How long one look for messages takes; a stream notices that it is to end within it.
_RECEIVE_S = 0.5
_RETRY_S = 0.5
_LAG_INTERVAL_S = 2.0
#: After so much of the time of an acknowledgement the broker delivers a message again, at the latest.
_SETTLE_FACTOR = 1.2
_FOREVER_S = 1e9

_log = get_logger("weft.stream")
_T = TypeVar("_T")


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    Attributes:
        graph: Graph or model; NAME/VERSION for one version.
        dead_letters: Topic for messages that cannot be answered; on the broker of ``source``.
        order_by: Field of the messages: those with an equal value are answered one after another, in order; "": in any
            order.
        column_of: Field of an input, if named differently.
        outputs: Those to write; none: all.
        keep: Fields of a message to write beside its answer.
        rows_per_request: Messages of one request at most; 0: the largest batch of the graph.
        max_inflight: Most received and unacknowledged messages.
        max_deliveries: A message delivered more often goes to the dead letters unprocessed: it may be what kills its
            consumers.
        grace_s: Time for requests in flight once the stream is to end.
        ack_wait_s: The broker redelivers a message after this time without a sign of life.
    """

    graph: str
    source: Address
    target: Address
    dead_letters: str
    order_by: str = ""
    column_of: Mapping[str, str] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    keep: Sequence[str] = ()
    parameters: Parameters = field(default_factory=dict)
    rows_per_request: int = 0
    max_inflight: int = 256
    max_deliveries: int = 5
    timeout_s: float = 60.0
    grace_s: float = 10.0
    ack_wait_s: float = 30.0


class StreamMetrics:
    """Counters of a stream, in their own registry, served on the metrics port."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.received = Counter("weft_stream_received_total", "Messages received", registry=registry)
        self.redelivered = Counter(
            "weft_stream_redelivered_total", "Messages received that had been delivered before", registry=registry
        )
        done = Counter(
            "weft_stream_messages_total", "Messages acknowledged, by outcome", ["outcome"], registry=registry
        )
        self.answered, self.dead = done.labels("answered"), done.labels("dead")
        self.lag = Gauge("weft_stream_lag_messages", "Messages not acknowledged; NaN: unknown", registry=registry)
        self.inflight = Gauge("weft_stream_inflight_messages", "Messages in work", registry=registry)
        self.request_s = Histogram(
            "weft_stream_request_seconds", "From the start of a request to its acknowledgement", registry=registry
        )


class MessageStream:
    """At least once: a message is acknowledged after its answer, or its dead letter, is written.

    The brokers of ``options.source`` and ``options.target``, which may be the same object, are not connected.
    """

    def __init__(
        self, client: V2Client, source: Broker, target: Broker, options: StreamOptions, metrics: StreamMetrics
    ) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._metrics = metrics
        name, _, version = options.graph.partition("/")
        self._graph = JobTarget(
            client,
            name,
            version,
            parameters=options.parameters,
            outputs=options.outputs,
            timeout_s=options.timeout_s,
            patience_s=_FOREVER_S,
            waits_for_model=True,
            clock_s=time.monotonic,
        )
        self._layout: Layout
        self._is_ending = asyncio.Event()
        self._inflight: dict[str, Message] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: The last task that has messages of a key.
        self._last_of: dict[str, asyncio.Task[None]] = {}
        self._has_room = asyncio.Event()

    def end(self) -> None:
        """Stop receiving; finish messages in flight within ``grace_s``."""
        self._is_ending.set()
        self._has_room.set()

    async def run(self) -> None:
        """Serve until ``end``.

        Raises:
            WeftError: It cannot begin, or the graph is gone.
            ExceptionGroup: A defect.
        """
        options = self._options
        signature = (await self._graph.identify()).signature
        self._layout = make_layout(
            signature,
            column_of=options.column_of,
            outputs=options.outputs,
            keep=options.keep,
            rows_per_request=options.rows_per_request,
        )
        try:
            await self._source.connect(options.source.topic)
            if self._target is not self._source:
                await self._target.connect(None)
            helpers = [asyncio.create_task(self._keep_alive()), asyncio.create_task(self._watch_lag())]
            try:
                await self._receive()
            finally:
                for helper in helpers:
                    helper.cancel()
                await self._drain()
                await asyncio.gather(*helpers, return_exceptions=True)
        finally:
            await self._source.close()
            if self._target is not self._source:
                await self._target.close()

    async def _receive(self) -> None:
        most = self._options.max_inflight
        is_settled = not self._options.order_by
        while not self._is_ending.is_set():
            if len(self._inflight) >= most:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            try:
                if not is_settled:
                    await self._settle()
                    is_settled = True
                messages = await self._source.receive(most - len(self._inflight), _RECEIVE_S)
            except UnavailableError as error:
                _log.warning("cannot receive: %s", error.message)
                is_settled = not self._options.order_by
                await asyncio.sleep(_RETRY_S)
                continue
            # One that is in work here already was delivered again, for the broker had not heard of it for too long.
            fresh = [message for message in messages if message.id not in self._inflight]
            size = self._layout.rows_per_request
            for first in range(0, len(fresh), size):
                self._start(fresh[first : first + size])

    async def _settle(self) -> None:
        """Wait until messages of a dead consumer, or lost in transit, are redelivered, before all others."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if await self._source.num_unacknowledged():
            _log.info("messages of before come again first")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_FACTOR * self._options.ack_wait_s):
                    await self._is_ending.wait()

    def _start(self, messages: Sequence[Message]) -> None:
        self._metrics.received.inc(len(messages))
        self._metrics.redelivered.inc(sum(message.num_deliveries > 1 for message in messages))
        self._inflight.update({message.id: message for message in messages})
        shard = _shard_of(messages, self._layout, self._options.order_by)
        keys = {str(key) for key in shard.columns[self._options.order_by]} if self._options.order_by else set()
        before = {task for key in keys if (task := self._last_of.get(key)) is not None and not task.done()}
        task = asyncio.create_task(self._answer_or_give_back(messages, shard, before))
        self._tasks.add(task)
        for key in keys:
            self._last_of[key] = task

        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            for key in keys:
                if self._last_of.get(key) is task:
                    del self._last_of[key]
            for message in messages:
                self._inflight.pop(message.id, None)
            self._has_room.set()

        task.add_done_callback(finished)

    async def _answer_or_give_back(
        self, messages: Sequence[Message], shard: Shard, before: set[asyncio.Task[None]]
    ) -> None:
        try:
            await self._answer(messages, shard, before)
        except Exception:
            _log.exception("messages are given back, to be delivered again")
            await asyncio.sleep(_RETRY_S)
            for message in messages:
                self._inflight.pop(message.id, None)
            with contextlib.suppress(UnavailableError):
                await self._source.give_back(messages)

    async def _answer(self, messages: Sequence[Message], shard: Shard, before: set[asyncio.Task[None]]) -> None:
        """Answer messages once the tasks ``before`` are done, publish the results in order, acknowledge."""
        if before:
            await asyncio.wait(before)
        start_s = time.perf_counter()
        for row, message in enumerate(messages):
            if message.num_deliveries > self._options.max_deliveries:
                shard.faults[row] = f"delivered {message.num_deliveries} times without an answer"
        result = await run_shard(shard, self._layout, self._graph.infer)
        failed = {each.row: each for each in result.failed}
        lists = {name: column.to_pylist() for name, column in result.columns.items()}
        rows = lists.pop(ROW)
        values = shard.columns.get(self._options.order_by, [None] * len(messages))
        answers = {}
        for row, *answer in zip(rows, *lists.values(), strict=True):
            message, value = messages[row], values[row]
            payload = json.dumps(dict(zip(lists, answer, strict=True)), ensure_ascii=False).encode()
            # With the key of its message, or the value that messages are ordered by: what has one key stays in order.
            key = str(value).encode() if message.key is None and value is not None else message.key
            answers[row] = Publication(message.id, payload, message.headers, key)
        failed |= await self._publish_answers(answers)
        for row in sorted(failed):
            await self._publish_dead(messages[row], failed[row])
        await self._insist(lambda: self._source.acknowledge(messages))
        self._metrics.answered.inc(len(messages) - len(failed))
        self._metrics.dead.inc(len(failed))
        self._metrics.request_s.observe(time.perf_counter() - start_s)

    async def _publish_answers(self, answers: Mapping[int, Publication]) -> dict[int, FailedRow]:
        """Publish the answers of rows, in their order; returns those that are larger than the broker takes."""
        if not answers:
            return {}
        try:
            await self._insist(lambda: self._target.publish(self._options.target.topic, list(answers.values())))
        except InvalidArgumentError as error:
            if len(answers) == 1:
                return {row: FailedRow(row, "", error.code, error.message) for row in answers}
            failed: dict[int, FailedRow] = {}
            for row, answer in answers.items():
                failed |= await self._publish_answers({row: answer})
            return failed
        return {}

    async def _publish_dead(self, message: Message, failure: FailedRow) -> None:
        headers = {
            **message.headers,
            "weft-status": failure.status,
            "weft-message": failure.message.replace("\n", " "),
            "weft-path": failure.path,
            "weft-source": message.id,
        }
        topic = self._options.dead_letters
        letter = Publication(message.id, message.payload, headers, message.key)
        try:
            await self._insist(lambda: self._source.publish(topic, [letter]))
        except InvalidArgumentError:  # with its headers it is larger than the broker takes; it stays in the source
            known = {name: headers[name] for name in ("weft-status", "weft-source")}
            bare = Publication(message.id, b"", known, message.key)
            await self._insist(lambda: self._source.publish(topic, [bare]))

    async def _insist(self, act: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                return await act()
            except UnavailableError as error:
                _log.warning("the broker does not answer: %s", error.message)
                await asyncio.sleep(_RETRY_S)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._options.ack_wait_s / 3)
            try:
                await self._source.extend(list(self._inflight.values()))
            except UnavailableError as error:
                _log.warning("messages in work may be delivered again: %s", error.message)

    async def _watch_lag(self) -> None:
        while True:
            try:
                lag = await self._source.lag()
            except UnavailableError:
                lag = None
            self._metrics.lag.set(math.nan if lag is None else lag)
            self._metrics.inflight.set(len(self._inflight))
            await asyncio.sleep(_LAG_INTERVAL_S)

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._options.grace_s)
        left = list(self._inflight.values())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if left:
            _log.warning("%d messages are given back", len(left))
            try:
                async with asyncio.timeout(self._options.grace_s):
                    await self._source.give_back(left)
            except (WeftError, TimeoutError):
                _log.warning("the broker delivers them again after %g s", self._options.ack_wait_s)


def _shard_of(messages: Sequence[Message], layout: Layout, order_by: str) -> Shard:
    """Messages as rows: each is a JSON object with a field for each column."""
    names = [*layout.columns, *([order_by] if order_by else [])]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    faults: dict[int, str] = {}
    for row, message in enumerate(messages):
        try:
            record = json.loads(message.payload)
        except (ValueError, RecursionError) as error:
            record = None
            faults[row] = f"no JSON: {error}"
        if not isinstance(record, dict):
            faults.setdefault(row, "a message must be an object of fields")
            record = {}
        for name, column in columns.items():
            column.append(record.get(name))
    return Shard(0, 0, len(messages), "", columns, faults=faults)
