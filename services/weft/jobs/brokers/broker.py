"""What a stream asks of a message broker: ``Broker``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Address(NamedTuple):
    """A topic of a broker.

    Attributes:
        server: ``SCHEME://HOST:PORT``, with user and password where it wants them.
        topic: Subject, stream or topic, as the broker calls it.
    """

    server: str
    topic: str


@dataclass(frozen=True)
class Message:
    """A message that was received and not acknowledged.

    Attributes:
        id: What the broker calls it; the same each time that it is delivered.
        payload: Its content.
        headers: Its headers.
        num_deliveries: Times that it was delivered to the group, this one included.
        handle: The broker's own.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    num_deliveries: int = 1
    handle: Any = field(default=None, repr=False, compare=False)


class Publication(NamedTuple):
    """A message to write.

    Attributes:
        id: The same for each attempt to write it, which tells the broker of a duplicate.
        payload: Its content.
        headers: Its headers.
    """

    id: str
    payload: bytes
    headers: Mapping[str, str]


class Broker(Protocol):
    """One connection to a broker, which comes back by itself after the broker was away.

    Not thread-safe; a method that is cancelled has no effect or its whole one. Each raises UnavailableError while the
    broker cannot be reached.
    """

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
        """Let another consumer have these at once."""

    async def num_unacknowledged(self) -> int:
        """Messages that consumers of the group were given, and that may come again behind younger ones."""

    async def lag(self) -> int | None:
        """Messages of the topic that the group has not acknowledged; None: the broker does not know."""

    async def close(self) -> None:
        """Close the connection; what was not acknowledged is delivered again."""
