"""NATS JetStream: a durable pull consumer of a subject."""

import asyncio
import contextlib
from collections.abc import Sequence

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, PubAck
from nats.js.client import JetStreamContext
from nats.js.errors import APIError
from nats.js.errors import NotFoundError as NoSuchStreamError
from typing_extensions import override

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.jobs.brokers import Address, Broker, Message, Publication

_CALL_TIMEOUT_S = 5.0
_RECONNECT_WAIT_S = 1
_DUPLICATE_HEADER = "Nats-Msg-Id"


class NatsBroker(Broker):
    """A connection to a NATS server, whose group is a durable consumer; see ``Broker``.

    A message that is published twice within the duplicate window of its stream, two minutes by default, is stored once.
    """

    ERRORS = (NatsError, APIError, OSError)

    def __init__(self, address: Address, group: str, ack_wait_s: float) -> None:
        super().__init__(address, group, ack_wait_s)
        self._connection = Client()
        self._has_begun = False
        self._subscription: JetStreamContext.PullSubscription | None = None

    @override
    async def connect(self, source: str | None) -> None:
        """See ``Broker``; the subject's stream must exist."""
        self._has_begun = True
        user, password = self._address.credentials() if self._address.secret() else (None, None)
        with self._failures():
            async with asyncio.timeout(_CALL_TIMEOUT_S):  # the client itself would try for ever
                await self._connection.connect(
                    self._address.server,
                    user=user,
                    password=password,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,
                    connect_timeout=int(_CALL_TIMEOUT_S),
                    error_cb=_ignore,
                )
            self._stream = self._connection.jetstream(timeout=_CALL_TIMEOUT_S)
            if source is None:
                return
            try:
                stream = await self._stream.find_stream_name_by_subject(source)
            except NoSuchStreamError:
                raise NotFoundError(f"{self._server} has no stream with the subject '{source}'; make one") from None
            self._name = stream
            config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=self._ack_wait_s, max_ack_pending=-1)
            self._subscription = await self._stream.pull_subscribe(source, self._group, stream=stream, config=config)

    @override
    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        if self._subscription is None:
            return []
        with self._failures():
            try:
                received = await self._subscription.fetch(num_messages, timeout_s)
            except TimeoutError:
                return []
        return [_message(each) for each in received]

    @override
    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """See ``Broker``; the subject must belong to a stream."""
        for each in publications:
            # The server closes the connection of who sends it more.
            if (size_bytes := _size_bytes(each)) > self._connection.max_payload:
                raise InvalidArgumentError(
                    f"{self._server} takes messages of {self._connection.max_payload} bytes, got {size_bytes}; "
                    "max_payload of its configuration allows more"
                )
        written: list[asyncio.Future[PubAck]] = []
        with self._failures():
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    for each in publications:
                        headers = {**each.headers, _DUPLICATE_HEADER: each.id}
                        written.append(await self._stream.publish_async(topic, each.payload, headers=headers))
                    await asyncio.gather(*written)
            finally:
                for future in written:
                    future.cancel()

    @override
    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """See ``Broker``; if the broker dies before it stores the acknowledgement, the message is redelivered."""
        with self._failures():
            for handle in _not_acknowledged(messages):
                await handle.ack()
            await self._connection.flush(int(_CALL_TIMEOUT_S))

    @override
    async def extend(self, messages: Sequence[Message]) -> None:
        with self._failures():
            for handle in _not_acknowledged(messages):
                await handle.in_progress()

    @override
    async def give_back(self, messages: Sequence[Message]) -> None:
        with self._failures():
            for handle in _not_acknowledged(messages):
                await handle.nak()

    @override
    async def num_unacknowledged(self) -> int:
        return (await self._info()).num_ack_pending or 0

    @override
    async def lag(self) -> int:
        info = await self._info()
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    @override
    async def close(self) -> None:
        if self._has_begun:
            with contextlib.suppress(NatsError, OSError):
                await self._connection.close()

    async def _info(self) -> ConsumerInfo:
        with self._failures():
            info: ConsumerInfo = await self._stream.consumer_info(self._name, self._group)
        return info


def _size_bytes(publication: Publication) -> int:
    """Upper bound for the size of payload and headers as NATS counts them."""
    headers = [*publication.headers.items(), (_DUPLICATE_HEADER, publication.id)]
    return len(publication.payload) + 32 + sum(len(f"{name}: {value}".encode()) + 2 for name, value in headers)


def _not_acknowledged(messages: Sequence[Message]) -> list[Msg]:
    """Those that were not sent an acknowledgement: the client refuses a second one, also where the first was lost."""
    return [message.handle for message in messages if not message.handle.is_acked]


def _message(message: Msg) -> Message:
    metadata = message.metadata
    return Message(
        f"{metadata.stream}.{metadata.sequence.stream}",
        message.data,
        {str(name): str(value) for name, value in (message.headers or {}).items()},
        metadata.num_delivered,
        message,
    )


async def _ignore(_: Exception) -> None:
    """Ignore connection errors: the client reconnects, and calls in between fail by themselves."""
