"""The interface of message brokers, and the table of brokers by address scheme.

A new broker is a module and a line in ``BROKERS``.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from weft.base.errors import InvalidArgumentError, UnavailableError

#: Option of every broker: a file whose content is the password.
PASSWORD_FILE = "password-file"  # noqa: S105  # a name
#: The password of an address that has a user and neither a password nor a file of it.
PASSWORD_VARIABLE = "WEFT_STREAM_PASSWORD"  # noqa: S105  # a name


class Address(NamedTuple):
    """Address of a topic.

    Attributes:
        server: ``SCHEME://HOST:PORT``, possibly with a user.
        topic: Subject, stream or topic, in the broker's terms.
        options: Other settings of the broker, by name.
    """

    server: str
    topic: str
    options: Mapping[str, str] = MappingProxyType({})

    @property
    def scheme(self) -> str:
        """Scheme of the server."""
        return urlsplit(self.server).scheme

    @property
    def hosts(self) -> str:
        """``HOST:PORT``, or several separated by commas."""
        return urlsplit(self.server).netloc.rpartition("@")[2]

    @property
    def name(self) -> str:
        """The server without a user or password, for messages."""
        return f"{self.scheme}://{self.hosts}"

    def credentials(self) -> tuple[str | None, str | None]:
        """User and password, each None if there is none. Raises as ``secret``."""
        user, _, password = (unquote(each) for each in urlsplit(self.server).netloc.rpartition("@")[0].partition(":"))
        return user or None, password or self.secret()

    def secret(self) -> str | None:
        """The password from a file or the environment; None: it is in the address or there is none.

        Raises:
            InvalidArgumentError: The file cannot be read.
        """
        if PASSWORD_FILE in self.options:
            file = self.options[PASSWORD_FILE]
            try:
                return Path(file).read_text().rstrip("\r\n")
            except (OSError, UnicodeError) as error:
                raise InvalidArgumentError(f"{PASSWORD_FILE}={file} of {self.name} must be a file: {error}") from None
        parts = urlsplit(self.server)
        return os.environ.get(PASSWORD_VARIABLE) if parts.username and not parts.password else None


@dataclass(frozen=True)
class Message:
    """A received, unacknowledged message.

    Attributes:
        id: The broker's id, the same for each delivery.
        num_deliveries: Deliveries to the group, this one included.
        handle: Internal to the broker.
        key: Messages of one key are in order; None: no key.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    num_deliveries: int = 1
    handle: Any = field(default=None, repr=False, compare=False)
    key: bytes | None = None


class Publication(NamedTuple):
    """A message to write.

    Its id is the same for each attempt to write it, so that the broker can drop duplicates. Messages of one key stay in
    order at brokers with partitions; None is any partition.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str]
    key: bytes | None = None


class Broker(ABC):
    """One connection to a broker, which reconnects by itself.

    Not thread-safe; a cancelled method has either no effect or its full one. Methods raise UnavailableError while the
    broker cannot be reached.

    Attributes:
        OPTIONS: Supported options of an address, with the allowed values of each; none: any.
        ERRORS: Exceptions that the client raises while the broker cannot be reached.

    Args:
        address: Its server and options are used; one broker serves all topics.
        group: Consumers of one group share the messages of a topic.
        ack_wait_s: The broker redelivers a message if its consumer shows no sign of life for this long.
    """

    OPTIONS: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    ERRORS: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, address: Address, group: str, ack_wait_s: float) -> None:
        self._address = address
        self._server = address.name
        self._group = group
        self._ack_wait_s = ack_wait_s
        self._source = ""

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except self.ERRORS as error:
            raise UnavailableError(f"{self._server}: {str(error) or type(error).__name__}") from error

    @abstractmethod
    async def connect(self, source: str | None) -> None:
        """Connect, and become a consumer of the topic ``source``. Raises NotFoundError if there is no such topic."""

    @abstractmethod
    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        """Up to ``num_messages`` messages, oldest first; none if none came within the time.

        Messages of dead consumers are redelivered, once the broker considers these dead.
        """

    @abstractmethod
    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """Write messages in order; they are durable once this returns; after an error some may be.

        Raises:
            InvalidArgumentError: One is too large for the broker.
        """

    @abstractmethod
    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Never deliver these again."""

    @abstractmethod
    async def extend(self, messages: Sequence[Message]) -> None:
        """Signal that these are still being processed, so that the broker does not redeliver them."""

    @abstractmethod
    async def give_back(self, messages: Sequence[Message]) -> None:
        """Return these for immediate redelivery, to any consumer."""

    @abstractmethod
    async def num_unacknowledged(self) -> int:
        """Number of delivered but unacknowledged messages of the group; they may come again after younger ones."""

    @abstractmethod
    async def lag(self) -> int | None:
        """Messages of the topic that the group has not acknowledged; None if the broker does not know."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; unacknowledged messages are redelivered."""


#: Module and class of each broker, imported when it is used: its client is a package of its own.
BROKERS = {
    "nats": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "tls": ("weft.jobs.brokers.nats_jetstream", "NatsBroker"),
    "redis": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "rediss": ("weft.jobs.brokers.redis_streams", "RedisBroker"),
    "kafka": ("weft.jobs.brokers.kafka", "KafkaBroker"),
    "kafka+ssl": ("weft.jobs.brokers.kafka", "KafkaBroker"),
}


def parse_address(text: str) -> Address:
    """Parse an address such as ``nats://127.0.0.1:4222/orders``, with options behind ``?``.

    Raises:
        InvalidArgumentError: The scheme is unknown, or there is no topic.
    """
    parts = urlsplit(text)
    topic = parts.path.removeprefix("/")
    if parts.scheme not in BROKERS or not parts.netloc or not topic:
        raise InvalidArgumentError(
            f"'{text}' must be SCHEME://HOST:PORT/TOPIC, with the scheme one of {', '.join(BROKERS)}"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Address(f"{parts.scheme}://{parts.netloc}", topic, options)


def make_broker(address: Address, group: str, ack_wait_s: float) -> Broker:
    """Create a broker, not connected yet; the arguments are those of ``Broker``.

    Raises:
        ModuleNotFoundError: Its client is not installed.
        InvalidArgumentError: It does not support an option or its value.
    """
    module, name = BROKERS[address.scheme]
    kind = getattr(import_module(module), name)
    known: Mapping[str, Sequence[str]] = {PASSWORD_FILE: (), **kind.OPTIONS}
    for name, value in address.options.items():
        if name not in known:
            raise InvalidArgumentError(f"{address.name} has no option '{name}'; it has {', '.join(known)}")
        if known[name] and value not in known[name]:
            raise InvalidArgumentError(
                f"{name} of {address.name} must be one of {', '.join(known[name])}, got '{value}'"
            )
    broker: Broker = kind(address, group, ack_wait_s)
    return broker
