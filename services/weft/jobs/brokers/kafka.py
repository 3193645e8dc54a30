"""Kafka: a consumer group of a topic."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import create_conn
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
)
from typing_extensions import override

from weft.base.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    WeftError,
)
from weft.jobs.brokers import PASSWORD_FILE, PASSWORD_VARIABLE, Address, Broker, Message, Publication

_CALL_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 30.0
#: What brokers take as the session timeout of a consumer unless told otherwise.
_MIN_SESSION_S, _MAX_SESSION_S = 6.0, 1800.0
#: Of the session timeout, which is how long a rebalance waits too, for the messages in work when it begins.
_DRAIN_SHARE = 0.7
#: Heartbeats say whether a consumer lives; one that waits for its graph is no reason for a rebalance.
_NEVER_MS = 10**9
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
#: Brokers take 4096 bytes of text with a commit: so many messages, a bit each, and so many runs of them.
_MAX_BITS, _MAX_RUNS = 8192, 32


class PartitionProgress:
    """A group's progress in a partition, stored in commits as an offset and a metadata text.

    The offset is that of the first unfinished message, -1 if none was committed. The text lists the messages behind it
    that are answered, so that they are not delivered again, and delivery counts of the others; a text of another client
    is ignored.
    """

    def __init__(self, offset: int = -1, text: str = "") -> None:
        self._end = offset
        self._unfinished: set[int] = set()
        self._answered: set[int] = set()
        #: Times that messages were given back, which come again.
        self._given_back: dict[int, int] = {}
        #: Deliveries to earlier consumers: the offset behind a run of messages, and their count; in order.
        self._runs: list[tuple[int, int]] = []
        self.is_changed = False
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = json.loads(text)
            bits = f"{int(said['answered'] or '0', 16):b}"
            self._runs = [(int(end), int(count)) for end, count in said["delivered"]]
            self._answered = {offset + place for place, bit in enumerate(reversed(bits)) if bit == "1"}

    @property
    def offset(self) -> int:
        """Offset of the first unfinished message, or of the next one."""
        return min(self._unfinished.union(self._given_back), default=self._end)

    @property
    def is_idle(self) -> bool:
        """Whether no message is being processed."""
        return not self._unfinished

    def deliver(self, offset: int) -> int:
        """Count a delivery and return the number of deliveries; 0 if the message is answered already."""
        self._end = max(self._end, offset + 1)
        self.is_changed = True
        if offset in self._answered:
            return 0
        self._unfinished.add(offset)
        return self._num_before(offset) + self._given_back.get(offset, 0) + 1

    def finish(self, offset: int) -> None:
        """Mark a message as answered; earlier ones may not be."""
        before = self.offset
        self._unfinished.discard(offset)
        self._given_back.pop(offset, None)
        self._answered.add(offset)
        if (first := self.offset) > before:
            self._answered = {each for each in self._answered if each >= first}
        self.is_changed = True

    def give_back(self, offset: int, *, counts: bool) -> None:
        """Return a message for redelivery; ``counts``: count this delivery."""
        self._unfinished.discard(offset)
        self._given_back[offset] = self._given_back.get(offset, 0) + counts

    def commit(self) -> tuple[int, str]:
        """The offset and text to commit."""
        first = self.offset
        ends = sorted({end for end, _ in self._runs if end > first} | ({self._end} if self._end > first else set()))
        runs = [(end, self._num_before(end - 1) + (end <= self._end)) for end in ends[:_MAX_RUNS]]
        if not runs:
            return first, ""
        num_bits = min(ends[-1] - first, _MAX_BITS)
        bits = "".join("1" if first + bit in self._answered else "0" for bit in reversed(range(num_bits)))
        answered = f"{int(bits or '0', 2):x}"
        return first, json.dumps({"answered": answered, "delivered": runs}, separators=(",", ":"))

    def _num_before(self, offset: int) -> int:
        return next((count for end, count in self._runs if offset < end), 0)


class KafkaBroker(Broker, ConsumerRebalanceListener):  # type: ignore[misc]  # the client has no types
    """A connection to Kafka brokers; see ``Broker``.

    On a rebalance, messages in flight are finished first, which keeps their order; those not finished within 0.7 of the
    session timeout, which is ``ack_wait_s``, are redelivered. An address is ``kafka://HOST:PORT`` or
    ``kafka+ssl://HOST:PORT``, several hosts separated by commas.

    Raises:
        InvalidArgumentError: Options do not fit each other, or a file cannot be read.
    """

    OPTIONS = MappingProxyType({"sasl": _MECHANISMS, "ca": (), "cert": (), "key": (), "idempotence": ("yes", "no")})
    ERRORS = (KafkaError, OSError)

    def __init__(self, address: Address, group: str, ack_wait_s: float) -> None:
        super().__init__(address, group, ack_wait_s)
        self._client = {"bootstrap_servers": address.hosts, **_security(address)}
        self._is_idempotent = address.options.get("idempotence", "yes") == "yes"
        self._session_s = min(max(ack_wait_s, _MIN_SESSION_S), _MAX_SESSION_S)
        self._consumer: Any = None
        self._producer: Any = None
        self._admin: Any = None
        self._is_closing = False
        self._progress: dict[TopicPartition, PartitionProgress] = {}
        #: Counts the times that partitions were shared out.
        self._generation = 0
        self._committing = asyncio.Lock()
        self._has_finished = asyncio.Event()

    @override
    async def connect(self, source: str | None) -> None:
        with self._failures():
            try:
                async with asyncio.timeout(self._session_s + _JOIN_TIMEOUT_S):
                    await self._connect(source)
            except (KafkaConnectionError, KeyError) as error:  # a KeyError: SCRAM of a user who is refused
                raise await self._why_not() or UnavailableError(f"{self._server}: {error}") from error
            except (GroupAuthorizationFailedError, TopicAuthorizationFailedError) as error:
                raise PermissionDeniedError(
                    f"{self._server}: the user may not read '{source}' as group '{self._group}': {error}"
                ) from error

    async def _connect(self, source: str | None) -> None:
        self._producer = AIOKafkaProducer(**self._client, acks="all", enable_idempotence=self._is_idempotent)
        try:
            await self._producer.start()
        except KafkaConnectionError:
            raise
        except KafkaError as error:
            if not self._is_idempotent:
                raise
            raise FailedPreconditionError(
                f"{self._server}: {error}; a broker without idempotent producers needs ?idempotence=no in its address"
            ) from error
        if source is None:
            return
        self._source = source
        self._admin = AIOKafkaAdminClient(**self._client)
        await self._admin.start()
        session_ms = int(self._session_s * 1000)
        self._consumer = AIOKafkaConsumer(
            **self._client,
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=session_ms // 10,
            rebalance_timeout_ms=session_ms,
            request_timeout_ms=session_ms + int(_JOIN_TIMEOUT_S * 1000),
            max_poll_interval_ms=_NEVER_MS,
        )
        self._consumer.subscribe([source], listener=self)
        await self._consumer.start()
        if not self._consumer.partitions_for_topic(source):
            raise NotFoundError(f"{self._server} has no topic '{source}'; make one")

    async def _why_not(self) -> WeftError | None:
        """Why the connection failed, as far as the client does not say it."""
        host, _, port = self._address.hosts.split(",")[0].rpartition(":")
        security = {name: value for name, value in self._client.items() if name != "bootstrap_servers"}
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                connection = await create_conn(host, int(port), **security)
        except ssl.SSLError as error:
            return UnavailableError(f"{self._server}: TLS: {error}; ?ca=FILE names the authority of its certificate")
        except (KafkaConnectionError, OSError, TimeoutError, ValueError):
            return None
        except (KafkaError, KeyError) as error:
            user = self._client["sasl_plain_username"]
            return UnauthenticatedError(f"{self._server} refuses the user '{user}': {error}")
        connection.close()
        return None

    @override
    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Wait for messages in flight, which keeps their order; heartbeats continue."""
        held = [self._progress[each] for each in revoked if each in self._progress]
        with contextlib.suppress(TimeoutError, KafkaError):
            async with asyncio.timeout(self._session_s * _DRAIN_SHARE):
                while not (self._is_closing or all(each.is_idle for each in held)):
                    self._has_finished.clear()
                    await self._has_finished.wait()
                await self._commit()

    @override
    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Forget the progress of partitions, since others may have worked on them."""
        self._generation += 1
        self._progress.clear()

    @override
    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        with self._failures():
            generation = self._generation
            await self._learn(self._consumer.assignment() - self._progress.keys(), generation)
            try:
                async with asyncio.timeout(timeout_s):  # the client waits for a rebalance without an end
                    batches = await self._consumer.getmany(timeout_ms=int(timeout_s * 1e3), max_records=num_messages)
            except TimeoutError:
                return []
            messages = []
            for partition, records in batches.items():
                if (progress := self._progress.get(partition)) is None:
                    self._seek(partition, records[0].offset)
                    continue
                delivered = [(record, progress.deliver(record.offset)) for record in records]
                messages += [_message(record, count) for record, count in delivered if count]
            try:
                # Before they are in work: a message that ends its consumers is known by its deliveries.
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await self._commit()
            except BaseException as error:
                self._take_back(messages, counts=False)
                if isinstance(error, CommitFailedError):  # the partitions are shared out anew
                    return []
                raise
        return messages

    async def _learn(self, partitions: Iterable[TopicPartition], generation: int) -> None:
        if wanted := list(partitions):
            committed = await self._admin.list_consumer_group_offsets(self._group, partitions=wanted)
            if generation == self._generation:
                self._progress |= {each: PartitionProgress(*committed.get(each, (-1, ""))) for each in wanted}

    @override
    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """See ``Broker``. Retries of the producer write no duplicates; those after a crash of the consumer do."""
        with self._failures():
            sent = []
            try:
                for each in publications:
                    headers = [(name, value.encode()) for name, value in each.headers.items()]
                    sent.append(await self._producer.send(topic, each.payload, key=each.key, headers=headers))
            except MessageSizeTooLargeError as error:
                raise self._too_large(error) from None
            finally:
                results = await asyncio.gather(*sent, return_exceptions=True)
            for result in results:
                if isinstance(result, MessageSizeTooLargeError):
                    raise self._too_large(result)
                if isinstance(result, BaseException):
                    raise result

    def _too_large(self, error: MessageSizeTooLargeError) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._server} takes no message of such a size: {error}")

    @override
    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """See ``Broker``. Messages of partitions that have moved to another consumer are redelivered there."""
        for message in messages:
            partition, offset = message.handle
            if progress := self._progress.get(partition):
                progress.finish(offset)
        self._has_finished.set()
        with self._failures(), contextlib.suppress(CommitFailedError):
            await self._commit()

    async def _commit(self) -> None:
        """Commit changed offsets, one commit at a time so that none goes back."""
        async with self._committing:
            assigned = self._consumer.assignment()
            changed = {
                at: each
                for at, each in self._progress.items()
                if each.is_changed and each.offset >= 0 and at in assigned
            }
            if not changed:
                return
            offsets = {at: each.commit() for at, each in changed.items()}
            for each in changed.values():
                each.is_changed = False
            try:
                await self._consumer.commit(offsets)
            except BaseException:
                for each in changed.values():
                    each.is_changed = True
                raise

    @override
    async def extend(self, messages: Sequence[Message]) -> None:
        """Nothing to do: the consumer's heartbeats suffice."""

    @override
    async def give_back(self, messages: Sequence[Message]) -> None:
        self._take_back(messages, counts=True)

    def _take_back(self, messages: Sequence[Message], *, counts: bool) -> None:
        for message in messages:
            partition, offset = message.handle
            if progress := self._progress.get(partition):
                progress.give_back(offset, counts=counts)
        for partition in {message.handle[0] for message in messages} & self._progress.keys():
            self._seek(partition, self._progress[partition].offset)
        self._has_finished.set()

    def _seek(self, partition: TopicPartition, offset: int) -> None:
        with contextlib.suppress(KafkaError):  # it is another consumer's by now
            self._consumer.seek(partition, offset)

    @override
    async def num_unacknowledged(self) -> int:
        """0: redelivered messages come before younger ones of their partition."""
        return 0

    @override
    async def lag(self) -> int:
        with self._failures():
            numbers = self._consumer.partitions_for_topic(self._source) or ()
            partitions = [TopicPartition(self._source, number) for number in numbers]
            starts = await self._consumer.beginning_offsets(partitions)
            committed = await self._admin.list_consumer_group_offsets(self._group, partitions=partitions)
            ends = await self._consumer.end_offsets(partitions)
        # The broker may have deleted messages that were not committed, or the topic may be a new one of its name.
        return sum(
            max(0, ends[each] - max(starts[each], committed[each].offset if each in committed else 0))
            for each in partitions
        )

    @override
    async def close(self) -> None:
        self._is_closing = True
        self._has_finished.set()
        for client in (self._consumer, self._producer):
            if client is not None:
                with contextlib.suppress(KafkaError, OSError, TimeoutError):
                    async with asyncio.timeout(_CALL_TIMEOUT_S):
                        await client.stop()
        if self._admin is not None:
            await self._admin.close()


def _message(record: Any, num_deliveries: int) -> Message:
    partition = TopicPartition(record.topic, record.partition)
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    own_id = f"{record.topic}.{record.partition}.{record.offset}"
    return Message(own_id, record.value or b"", headers, num_deliveries, (partition, record.offset), record.key)


def _security(address: Address) -> dict[str, Any]:
    options = address.options
    user, password = address.credentials()
    mechanism = options.get("sasl")
    if mechanism is None and user:
        raise InvalidArgumentError(
            f"{address.name} with the user '{user}' must say how it logs in: ?sasl= one of {', '.join(_MECHANISMS)}"
        )
    if mechanism and not (user and password):
        raise InvalidArgumentError(
            f"{address.name} with ?sasl= must have a user (kafka://USER@HOST:PORT) and a password, in a file "
            f"(&{PASSWORD_FILE}=FILE) or the environment ({PASSWORD_VARIABLE})"
        )
    is_encrypted = address.scheme == "kafka+ssl"
    if not is_encrypted and (given := {"ca", "cert", "key"} & options.keys()):
        raise InvalidArgumentError(f"{min(given)} of {address.name} needs TLS: kafka+ssl://")
    return {
        "security_protocol": ("SASL_" if mechanism else "") + ("SSL" if is_encrypted else "PLAINTEXT"),
        "ssl_context": _tls(address) if is_encrypted else None,
        "sasl_mechanism": mechanism or "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


def _tls(address: Address) -> ssl.SSLContext:
    options = address.options
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except OSError as error:
        raise InvalidArgumentError(f"ca, cert and key of {address.name} must be files in PEM form: {error}") from error
    return context
