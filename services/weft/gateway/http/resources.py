"""What the handlers of all interfaces share."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from weft.base.caching.response_cache import ExpiringCache
from weft.base.processes.malloc import give_back_freed_memory
from weft.gateway.http.body import BytesInWork, read_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.offload import Offload
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


P = ParamSpec("P")
R = TypeVar("R")

#: Freed memory is returned to the system so long after the last large body, when nothing holds it any more.
_GIVE_BACK_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request.

    Attributes:
        max_body_bytes: Size of its body.
        max_json_bytes: Size of its JSON.
        max_bytes_in_work: Size of the bodies of all requests in work.
        timeout_s: Longest response time in seconds, whatever the request asks for.
    """

    max_body_bytes: int
    max_json_bytes: int
    max_bytes_in_work: int
    timeout_s: float


class Resources:
    """Client of the router, limits, and where large bodies are parsed; create it on the event loop that uses it.

    Args:
        router: Client of the router.
        limits: Limits of each request.

    Attributes:
        stopping: Set when the grace period is over: requests in flight then fail with UNAVAILABLE.
        is_draining: No more requests are wanted.
        in_work: Bytes of all bodies in work.
    """

    def __init__(self, router: V2Client, limits: Limits) -> None:
        self.router = router
        self.limits = limits
        self.stopping = asyncio.Event()
        self.is_draining = False
        self.in_work = BytesInWork(limits.max_bytes_in_work, limits.max_body_bytes, _give_back_memory)
        self._keys = KeyCheck(router)
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
        await self.check_key(context)
        return await read_body(request, context, self.in_work, max_bytes)

    async def check_key(self, context: RequestContext) -> None:
        """Check the client's key. Raises RemoteError if it is not valid, or the router cannot be asked."""
        await self._keys.check(context.identity())

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
