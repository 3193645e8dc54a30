"""Check of a client's key before anything is done for it."""

import time
from collections.abc import Callable

from weft.base.caching.expiring import ExpiringCache
from weft.v2.client.v2_client import Metadata, V2Client
from weft_protos import grpc_service_pb2 as pb

#: How long the router has for it, in seconds.
CHECK_TIMEOUT_S = 5.0
#: How long a valid key is taken without another question, in seconds: it costs its holder nothing, and each call for a
#: model is checked by the router anyway.
CACHE_TTL_S = 2.0
_MAX_CACHED = 4096


class KeyCheck:
    """Asks the router whether it knows a client; owned by the event loop.

    Args:
        router: Client of the router.
        clock_s: Monotonic clock in seconds.
    """

    def __init__(self, router: V2Client, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._valid = ExpiringCache[Metadata, None](CACHE_TTL_S, _MAX_CACHED, clock_s)

    async def check(self, identity: Metadata) -> None:
        """Check the client with these keys.

        Raises:
            RemoteError: UNAUTHENTICATED, or the router cannot be reached.
        """

        async def ask() -> None:
            wanted = pb.ServerMetadataRequest()
            await self._router.call("ServerMetadata", wanted, timeout_s=CHECK_TIMEOUT_S, metadata=identity)

        await self._valid.get(identity, ask)
