"""What a stream asks of a message broker: ``Broker``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from weft.base.errors import InvalidArgumentError

#: Option of every broker: a file whose content is the password.
PASSWORD_FILE = "password-file"  # noqa: S105  # a name
#: The password of an address that has a user and neither a password nor a file of it.
PASSWORD_VARIABLE = "WEFT_STREAM_PASSWORD"  # noqa: S105  # a name


class Address(NamedTuple):
    """A topic of a broker.

    Attributes:
        server: ``SCHEME://HOST:PORT``, with a user where it wants one.
        topic: Subject, stream or topic, as the broker calls it.
        options: What else the broker is to know, by name.
    """

    server: str
    topic: str
    options: Mapping[str, str] = MappingProxyType({})

    @property
    def scheme(self) -> str:
        """Of the server."""
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
        """User and password, each None if there is none.

        Raises:
            InvalidArgumentError: The file of the password cannot be read.
        """
        user, _, password = (unquote(each) for each in urlsplit(self.server).netloc.rpartition("@")[0].partition(":"))
        return user or None, password or self.secret()

    def secret(self) -> str | None:
        """The password, if it stands in a file or the environment; None: in the address or nowhere.

        Raises:
            InvalidArgumentError: The file cannot be read.
        """
        if PASSWORD_FILE in self.options:
            return read_option(self, PASSWORD_FILE).rstrip("\r\n")
        parts = urlsplit(self.server)
        return os.environ.get(PASSWORD_VARIABLE) if parts.username and not parts.password else None


def read_option(address: Address, name: str) -> str:
    """The content of the file that an option names.

    Raises:
        InvalidArgumentError: It cannot be read.
    """
    try:
        return Path(address.options[name]).read_text()
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(
            f"{name}={address.options[name]} of {address.name} must be a file: {error}"
        ) from None


@dataclass(frozen=True)
class Message:
    """A message that was received and not acknowledged.

    Attributes:
        id: What the broker calls it; the same each time that it is delivered.
        num_deliveries: Times that it was delivered to the group, this one included.
        handle: The broker's own.
        key: Messages of one key are in order; None: the broker has no keys, or this message none.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    num_deliveries: int = 1
    handle: Any = field(default=None, repr=False, compare=False)
    key: bytes | None = None


class Publication(NamedTuple):
    """A message to write.

    Attributes:
        id: The same for each attempt to write it, which tells the broker of a duplicate.
        key: Messages of one key stay in order at brokers with partitions; None: any partition.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str]
    key: bytes | None = None


class Broker(Protocol):
    """One connection to a broker, which comes back by itself after the broker was away.

    Not thread-safe; a method that is cancelled has no effect or its whole one. Each raises UnavailableError while the
    broker cannot be reached.

    Attributes:
        OPTIONS: Of an address, with the values that each may have; none: any.
    """

    OPTIONS: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})

    async def connect(self, source: str | None) -> None:
        """Connect, and become a consumer of the topic ``source``.

        Raises:
            NotFoundError: There is no such topic.
        """

    async def receive(self, num_messages: int, timeout_s: float) -> Sequence[Message]:
        """Up to so many messages, oldest first; none if none came within the time.

        Those whose consumer has died are delivered again, once the broker believes so.
        """

    async def publish(self, topic: str, publications: Sequence[Publication]) -> None:
        """Write messages in their order, which are kept once this returns; after an error some may be.

        Raises:
            InvalidArgumentError: One is larger than the broker takes.
        """

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Never deliver these again."""

    async def extend(self, messages: Sequence[Message]) -> None:
        """Say that these are still in work, before the broker believes that their consumer has died."""

    async def give_back(self, messages: Sequence[Message]) -> None:
        """Let another consumer, or this one, have these at once."""

    async def num_unacknowledged(self) -> int:
        """Messages that consumers of the group were given, and that may come again behind younger ones."""

    async def lag(self) -> int | None:
        """Messages of the topic that the group has not acknowledged; None: the broker does not know."""

    async def close(self) -> None:
        """Close the connection; what was not acknowledged is delivered again."""
