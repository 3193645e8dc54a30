"""What both sides of ``weft.mesh.v1.Exchange`` share: names, limits, and the messages on their way out."""

import asyncio
import itertools
from collections import OrderedDict

from weft_protos import mesh_pb2

#: What ``ServerMetadata`` lists where exchanges are offered.
EXTENSION = "weft_exchange"

_DESCRIPTOR = mesh_pb2.DESCRIPTOR.services_by_name["Exchange"]
SERVICE_NAME = _DESCRIPTOR.full_name
METHOD_NAME = _DESCRIPTOR.methods[0].name

#: Calls of one exchange that may be in work or wait to be sent, and bytes that may wait. Beyond either a service reads
#: no more, which gRPC turns into back-pressure, and a caller sends no more.
MAX_INFLIGHT = 1024
MAX_WAITING_BYTES = 1 << 24

#: Envelopes that are larger together do not travel in one message, in bytes. One that is larger travels alone.
MAX_BATCH_BYTES = 1 << 18


class Outbox:
    """Envelopes in order; what is put while a message is being written goes out together, and nothing waits when idle.

    An envelope is a serialized message with one call, or one answer. Protobuf messages that lie one behind the other
    are read as one, their repeated fields joined; so each envelope is serialized once and copied when it is joined.

    Args:
        max_batch_bytes: Size of a message of several envelopes.

    Attributes:
        envelopes: What waits, by number.
        num_bytes: Of what waits.
    """

    def __init__(self, max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
        self.num_bytes = 0
        self._max_batch_bytes = max_batch_bytes
        self.envelopes: OrderedDict[int, bytes] = OrderedDict()
        self._numbers = itertools.count()
        self._is_ended = False
        self._taker: asyncio.Future[None] | None = None

    def put(self, envelope: bytes) -> int:
        """The envelope goes out behind those before it, after ``end`` it does not; its number, for ``drop``."""
        number = next(self._numbers)
        if not self._is_ended:
            self.envelopes[number] = envelope
            self.num_bytes += len(envelope)
            if self._taker is not None and not self._taker.done():
                self._taker.set_result(None)
        return number

    def drop(self, number: int) -> bool:
        """The envelope does not go out; False if it is on its way already."""
        envelope = self.envelopes.pop(number, None)
        if envelope is None:
            return False
        self.num_bytes -= len(envelope)
        return True

    def end(self) -> None:
        """Nothing more is put; what waits still goes out."""
        self._is_ended = True
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self) -> bytes:
        """The next message; b"" when everything is out and nothing more comes. There is one taker."""
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
