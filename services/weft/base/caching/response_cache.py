"""Caches with a time to live: of responses, up to a size, and of any values, up to a number."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from weft.base.core import ParameterValue
from weft.base.tensors import WireTensor

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: Estimated overhead of an entry beyond its tensor data: the key, tuples and strings.
_ENTRY_BYTES = 512


class CachedResponse(NamedTuple):
    """The response of a step, a graph or a model.

    Attributes:
        outputs: Tensors in an order that the key implies; None is absent.
        parameters: Response parameters.
        version: Version of the model; "" if there is more than one.
    """

    outputs: tuple[WireTensor | None, ...]
    parameters: Mapping[str, ParameterValue]
    version: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes in a cache, including the key; an estimate that is never too low."""
        size = _ENTRY_BYTES + sum(len(tensor.data) + 64 for tensor in self.outputs if tensor is not None)
        return size + sum(len(name) + len(str(value)) + 128 for name, value in self.parameters.items())


class _Entry(NamedTuple):
    response: CachedResponse
    num_bytes: int
    expiry_ns: int


class ResponseCache:
    """Responses by key; evicts the least recently used.

    Args:
        max_bytes: Limit of all entries together; a larger response is not cached.
        ttl_ms: Time to live, in milliseconds; 0: until evicted.
        clock_ns: Clock of the time to live.
        stale_ms: Time after expiry in which ``get_stale`` still returns a response, in milliseconds.
    """

    def __init__(self, max_bytes: int, ttl_ms: int, clock_ns: Callable[[], int], stale_ms: int = 0) -> None:
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ms * 1_000_000
        self._stale_ns = stale_ms * 1_000_000
        self._clock_ns = clock_ns
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Entries, including expired ones that are not removed yet."""
        return len(self._entries)

    def get(self, key: bytes) -> CachedResponse | None:
        """The response, which becomes the most recently used; None if missing or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_ns and (past_ns := self._clock_ns() - entry.expiry_ns) >= 0:
            if past_ns >= self._stale_ns:
                self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.response

    def get_stale(self, key: bytes) -> CachedResponse | None:
        """The response, even if expired by less than ``stale_ms``; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or (self._ttl_ns and self._clock_ns() - entry.expiry_ns >= self._stale_ns):
            return None
        self._entries.move_to_end(key)
        return entry.response

    def put(self, key: bytes, response: CachedResponse) -> None:
        """Store a response, replacing that of the same key and evicting others to make room."""
        self._remove(key)
        num_bytes = response.num_bytes
        if num_bytes > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        self._entries[key] = _Entry(response, num_bytes, self._clock_ns() + self._ttl_ns)
        self.num_bytes += num_bytes

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes


def cache_key_base(subject: Iterable[str], outputs: Iterable[str]) -> blake2b:
    """Hash of the key parts that many requests share.

    Args:
        subject: Callee: target, model, version.
        outputs: Names of the requested outputs, in order.
    """
    return blake2b(repr((tuple(subject), tuple(outputs))).encode(), digest_size=32)


def cache_key(base: blake2b, inputs: Iterable[tuple[str, WireTensor | None]], extra: str) -> bytes:
    """Cache key of a request; 32 bytes, about 1 ms per MB of input.

    Args:
        base: Result of ``cache_key_base``. Not modified.
        inputs: By name, in a fixed order; an absent one (None) differs from an empty one.
        extra: Anything else that the response depends on; "" for nothing.
    """
    digest = base.copy()
    for name, tensor in inputs:
        if tensor is not None:
            datatype, shape, data = tensor
            digest.update(repr((name, datatype, shape, len(data))).encode())
            digest.update(data)
    digest.update(repr(extra).encode())
    return digest.digest()


class ExpiringCache(Generic[Key, Value]):
    """Keeps values for some time; owned by the event loop.

    Args:
        ttl_s: How long, in seconds.
        max_entries: Most that are kept; then the oldest is forgotten.
    """

    def __init__(self, ttl_s: float, max_entries: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock_s = clock_s
        #: When each expires, and what it is; oldest first.
        self._entries: dict[Key, tuple[float, Value]] = {}

    def __len__(self) -> int:
        """Values that are kept, expired or not."""
        return len(self._entries)

    async def get(self, key: Key, ask: Callable[[], Awaitable[Value]]) -> Value:
        """The value of ``key``, from ``ask`` where none is known; what that raises is not kept."""
        known = self._entries.get(key)
        if known is not None and self._clock_s() < known[0]:
            return known[1]
        value = await ask()
        self._entries.pop(key, None)
        while len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock_s() + self._ttl_s, value)
        return value
