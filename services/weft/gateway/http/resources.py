"""Resources shared by all handlers: router client, limits, keys, request bodies and the bytes that they hold."""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from weft.base.caching import ExpiringCache
from weft.base.errors import ResourceExhaustedError
from weft.base.processes.malloc import give_back_freed_memory
from weft.gateway.errors import RequestError
from weft.gateway.http.request_context import RequestContext
from weft.gateway.offload import Offload
from weft.v2.client.v2_client import Metadata, V2Client
from weft_protos import grpc_service_pb2 as pb

#: Time for a client to send its body, in seconds.
BODY_TIMEOUT_S = 60.0
#: When a client that was refused for the bytes in work may ask again, in milliseconds.
_RETRY_MS = 1000
#: Content types that a browser sends for a foreign page without asking.
_SIMPLE_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
#: Freed memory is given back after as many bytes in work.
_LARGE_BYTES = 4 << 20


class BytesInWork:
    """Limits the bytes of request bodies being processed, over all connections; owned by the event loop.

    A client with a key gets at most half of what the others leave, but ``max_body_bytes`` in any case, so that another
    client always finds room. Clients without a key count as one.

    Args:
        give_back: Called when no body is left, if there were many bytes: returns freed memory to the system.
    """

    def __init__(self, limit_bytes: int, max_body_bytes: int, give_back: Callable[[], object]) -> None:
        self.num_bytes = 0
        self._by_client = Counter[Metadata]()
        self._limit_bytes = limit_bytes
        self._max_body_bytes = max_body_bytes
        self._give_back = give_back
        self._peak_bytes = 0

    def add(self, client: Metadata, num_bytes: int, *, further_bytes: int = 0) -> None:
        """Count received bytes; ``further_bytes`` are expected to follow, and must fit as well.

        Raises ResourceExhaustedError if there are too many; nothing is counted then.
        """
        own = self._by_client[client]
        others = self.num_bytes - own
        limit, whose = self._limit_bytes - others, ""
        if client and limit > self._max_body_bytes:
            limit, whose = max(self._max_body_bytes, limit // 2), " of this key"
        if (wanted := own + num_bytes + further_bytes) > limit:
            if not whose:
                wanted, limit = wanted + others, self._limit_bytes
            raise ResourceExhaustedError(
                f"the bodies{whose} in work would have {wanted} bytes with this one; at most {limit} are taken at "
                "once; send it again later, or in smaller pieces",
                retry_after_ms=_RETRY_MS,
            )
        self._by_client[client] += num_bytes
        self.num_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.num_bytes)

    def remove(self, client: Metadata, num_bytes: int) -> None:
        """Release counted bytes."""
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]
        if not self.num_bytes and self._peak_bytes >= _LARGE_BYTES:
            self._peak_bytes = 0
            self._give_back()


async def read_body(request: Request, context: RequestContext, in_work: BytesInWork, max_bytes: int) -> list[bytes]:
    """Read the body, in parts; its bytes count as in work until the request ends.

    Raises:
        RequestError: The body is larger than ``max_bytes`` (413), or not received within ``BODY_TIMEOUT_S`` (408).
        ResourceExhaustedError: Too many bytes are in work.
        starlette.requests.ClientDisconnect: The client disconnected before its end.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, context, in_work, max_bytes)
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_TIMEOUT_S:g} s", http_status=408) from None


def check_content_type(request: Request) -> None:
    """Check that the body is declared to be JSON. Raises RequestError (415).

    This blocks cross-site requests: a browser sends that type to another origin only after a preflight.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise RequestError(
            f"content-type '{declared}' is not taken; send JSON with 'content-type: application/json'", http_status=415
        )


def check_origin(request: Request) -> None:
    """Reject requests that another origin's page can send without a preflight, since they may unload models.

    Raises RequestError (415).
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and declared in _SIMPLE_TYPES:
        raise RequestError(
            f"content-type '{declared}' is not taken of a page of another origin; send "
            "'content-type: application/json'",
            http_status=415,
        )


async def _read(request: Request, context: RequestContext, in_work: BytesInWork, max_bytes: int) -> list[bytes]:
    declared_size = request.headers.get("content-length", "")
    size = int(declared_size) if declared_size.isdecimal() and len(declared_size) < 20 else 0
    if size > max_bytes:
        raise too_large(f"{size} bytes", max_bytes)
    client = context.identity()
    in_work.add(client, 0, further_bytes=size)
    parts: list[bytes] = []
    num_bytes = num_counted = 0
    context.at_end.callback(lambda: in_work.remove(client, num_counted))
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        in_work.add(client, len(part))
        num_counted = num_bytes
        parts.append(part)
    return parts


def too_large(got: str, max_bytes: int) -> RequestError:
    """Error for a body with too many bytes."""
    return RequestError(f"the body has {got}; at most {max_bytes} are taken", code="body_too_large", http_status=413)


#: ``wbits`` of zlib: gzip, and zlib's own format, which HTTP calls deflate.
_WBITS = {"gzip": 31, "deflate": 15}
_PIECE_BYTES = 1 << 20
#: Fastest: a response is compressed while its client waits.
_LEVEL = 1
#: A smaller response is not compressed.
MIN_COMPRESSED_BYTES = 1024


async def decompressed(
    parts: Sequence[bytes], encoding: str, max_bytes: int, count: Callable[[int], object]
) -> list[bytes]:
    """Decompress a body with this ``content-encoding``, on a thread.

    ``count`` is called with the size of each piece as it is made; it may raise to stop. Raises RequestError: the
    encoding is unknown (415), the body is corrupt (400), or its content is larger than ``max_bytes`` (413).
    """
    wbits = _WBITS.get(encoding)
    if wbits is None:
        raise RequestError(
            f"content-encoding '{encoding[:40]}' is not taken; send gzip, deflate, or none", http_status=415
        )
    made = _decompressed(parts, encoding, wbits)
    pieces: list[bytes] = []
    size = 0
    while (piece := await asyncio.to_thread(next, made, None)) is not None:
        size += len(piece)
        if size > max_bytes:
            raise too_large(f"more than {max_bytes} bytes when decompressed", max_bytes)
        count(len(piece))
        pieces.append(piece)
    return pieces


def _decompressed(parts: Sequence[bytes], encoding: str, wbits: int) -> Iterator[bytes]:
    """Pieces of at most twice ``_PIECE_BYTES``."""
    reader = zlib.decompressobj(wbits)
    found: list[bytes] = []
    size = 0
    try:
        for part in parts:
            rest = part
            while rest and not reader.eof:
                found.append(reader.decompress(rest, _PIECE_BYTES))
                rest = reader.unconsumed_tail
                size += len(found[-1])
                if size >= _PIECE_BYTES:
                    yield b"".join(found)
                    found, size = [], 0
    except zlib.error as error:
        raise RequestError(f"the body is not of its content-encoding {encoding}: {error}") from None
    if not reader.eof or reader.unused_data:
        what = "goes on after its end" if reader.eof else "is cut off"
        raise RequestError(f"the body, of content-encoding {encoding}, {what}")
    yield b"".join(found)


def accepted_encoding(header: str) -> str:
    """The first of gzip and deflate in an ``accept-encoding`` value; "" for neither."""
    for item in header.lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() in _WBITS and weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return name.strip()
    return ""


async def compressed(pieces: Sequence[bytes], encoding: str) -> list[bytes]:
    """The pieces of a body, compressed on a thread."""
    return await asyncio.to_thread(_compress, pieces, _WBITS[encoding])


def _compress(pieces: Sequence[bytes], wbits: int) -> list[bytes]:
    writer = zlib.compressobj(_LEVEL, wbits=wbits)
    return [*(writer.compress(piece) for piece in pieces), writer.flush()]


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
    """Limits of a request: its body, the JSON in it, all bodies in work, and the time for an answer."""

    max_body_bytes: int
    max_json_bytes: int
    max_bytes_in_work: int
    timeout_s: float


class Resources:
    """Router client, limits, and processes that parse large bodies; create it on the event loop that uses it.

    Attributes:
        stopping: Set when the grace period is over: requests in flight then fail with UNAVAILABLE.
        is_draining: The process is shutting down and wants no more requests.
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
        """Stop the gateway's parsing processes."""
        self._offload.close()

    async def body(self, request: Request, context: RequestContext, max_bytes: int) -> list[bytes]:
        """Check the client's key, then read the body, in parts.

        Raises RemoteError if the key is not valid, or the router cannot be asked, and like ``read_body``.
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
        """Run ``work`` for a request; if it is large, in another process: see ``Offload.run``."""
        if is_large:
            return await self._offload.run(context.identity(), work, *args, **kwargs)
        return work(*args, **kwargs)


def _give_back_memory() -> None:
    """Return freed memory to the system, on a thread because it takes milliseconds."""
    loop = asyncio.get_running_loop()
    loop.call_later(_GIVE_BACK_AFTER_S, loop.run_in_executor, None, give_back_freed_memory)
