"""What the handlers of all interfaces share."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from weft.base.caching.expiring import ExpiringCache
from weft.base.processes.malloc import give_back_freed_memory
from weft.gateway.http.body import BytesInWork, read_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.offload import Offload
from weft.v2.client.v2_client import Metadata, V2Client
from weft_protos import grpc_service_pb2 as pb

P = ParamSpec("P")
R = TypeVar("R")

#: How long the router has to check a key, in seconds.
CHECK_TIMEOUT_S = 5.0
#: How long a valid key is taken without another question, in seconds: it costs its holder nothing, and each call for a
#: model is checked by the router anyway.
CACHE_TTL_S = 2.0
_MAX_CACHED = 4096
#: Freed memory is returned to the system so long after the last large body, when nothing holds it any more.
_GIVE_BACK_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request: of its body, of the JSON in it, of all bodies in work, and of the time for an answer."""

    max_body_bytes: int
    max_json_bytes: int
    max_bytes_in_work: int
    timeout_s: float


class Resources:
    """Client of the router, limits, and where large bodies are parsed; create it on the event loop that uses it.

    Attributes:
        stopping: Set when the grace period is over: requests in flight then fail with UNAVAILABLE.
        is_draining: No more requests are wanted.
        in_work: Bytes of all bodies in work.
    """

    def __init__(self, router: V2Client, limits: Limits, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.router = router
        self.limits = limits
        self.stopping = asyncio.Event()
        self.is_draining = False
        self.in_work = BytesInWork(limits.max_bytes_in_work, limits.max_body_bytes, _give_back_memory)
        self._valid_keys = ExpiringCache[Metadata, None](CACHE_TTL_S, _MAX_CACHED, clock_s)
        self._offload = Offload()

    def close(self) -> None:
        """End what still runs in processes of the gateway's own."""
        self._offload.close()

    async def body(self, request: Request, context: RequestContext, max_bytes: int) -> list[bytes]:
        """The body of a client with a valid key, in parts; others get their error before anything of it is read.

        Raises:
            RemoteError: The key is not valid, or the router cannot be asked.
            WeftError: See ``read_body``.
        """
        await self.check_key(context.identity())
        return await read_body(request, context, self.in_work, max_bytes)

    async def check_key(self, identity: Metadata) -> None:
        """Check the client's key. Raises RemoteError if it is not valid, or the router cannot be asked."""

        async def ask() -> None:
            wanted = pb.ServerMetadataRequest()
            await self.router.call("ServerMetadata", wanted, timeout_s=CHECK_TIMEOUT_S, metadata=identity)

        await self._valid_keys.get(identity, ask)

    async def run(
        self, context: RequestContext, is_large: bool, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The result of ``work`` for a request, of large work from another process: see ``Offload.run``."""
        if is_large:
            return await self._offload.run(context.identity(), work, *args, **kwargs)
        return work(*args, **kwargs)


def _give_back_memory() -> None:
    """On a thread, since it takes milliseconds."""
    loop = asyncio.get_running_loop()
    loop.call_later(_GIVE_BACK_AFTER_S, loop.run_in_executor, None, give_back_freed_memory)
