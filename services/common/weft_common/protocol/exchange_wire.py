"""Names, limits and the outbox of ``weft.mesh.v1.Exchange``, shared by client and server."""

import asyncio
import itertools
from collections import OrderedDict

from weft_protos import mesh_pb2

#: Extension in ``ServerMetadata`` of servers with exchanges.
EXTENSION = "weft_exchange"

_DESCRIPTOR = mesh_pb2.DESCRIPTOR.services_by_name["Exchange"]
SERVICE_NAME = _DESCRIPTOR.full_name
METHOD_NAME = _DESCRIPTOR.methods[0].name

#: Limits of one exchange: calls in flight or queued to be sent, and queued bytes. Beyond either, a service stops
#: reading, which gRPC turns into back-pressure, and a caller stops sending.
MAX_INFLIGHT = 1024
MAX_WAITING_BYTES = 1 << 24

#: Largest message of several envelopes, in bytes. A larger envelope is sent alone.
MAX_BATCH_BYTES = 1 << 18


class Outbox:
    """Queue of envelopes; those queued while a message is being written are sent together. Adds no delay when idle.

    An envelope is a serialized message with one call, or one response. Concatenated protobuf messages parse as one
    message with repeated fields merged, so each envelope is serialized once and joined by copying.

    Args:
        max_batch_bytes: Limit of a message of several envelopes.

    Attributes:
        num_bytes: Queued bytes.
    """

    def __init__(self, max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
        self.num_bytes = 0
        self._max_batch_bytes = max_batch_bytes
        self.envelopes: OrderedDict[int, bytes] = OrderedDict()
        self._numbers = itertools.count()
        self._is_ended = False
        self._taker: asyncio.Future[None] | None = None

    def put(self, envelope: bytes) -> int:
        """Queue an envelope, unless the outbox has ended; returns its number, for ``drop``."""
        number = next(self._numbers)
        if not self._is_ended:
            self.envelopes[number] = envelope
            self.num_bytes += len(envelope)
            if self._taker is not None and not self._taker.done():
                self._taker.set_result(None)
        return number

    def drop(self, number: int) -> bool:
        """Remove a queued envelope; False if it was taken already."""
        envelope = self.envelopes.pop(number, None)
        if envelope is None:
            return False
        self.num_bytes -= len(envelope)
        return True

    def end(self) -> None:
        """Accept no more envelopes; queued ones are still sent."""
        self._is_ended = True
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self) -> bytes:
        """The next message; b"" at the end. There is one consumer."""
        envelopes = self.envelopes
        while not envelopes:
            if self._is_ended:
                return b""
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        batch = [envelopes.popitem(last=False)[1]]
        size_bytes = len(batch[0])
        while envelopes and size_bytes + len(next(iter(envelopes.values()))) <= self._max_batch_bytes:
            batch.append(envelopes.popitem(last=False)[1])
            size_bytes += len(batch[-1])
        self.num_bytes -= size_bytes
        return b"".join(batch)
