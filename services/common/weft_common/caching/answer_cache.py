"""Answers that are kept: the least recently used go first, and none is older than its time to live."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from weft_common.core import ParameterValue
from weft_common.tensors import WireTensor

#: What an entry takes beside the data of its tensors: the key, the tuples and strings around.
_ENTRY_BYTES = 512


class Answer(NamedTuple):
    """What a step or a graph answered.

    Attributes:
        outputs: Tensors in the order in which they were requested; None is absent.
        parameters: Response parameters.
        version: Of the model that answered; "" where there is more than one.
    """

    outputs: tuple[WireTensor | None, ...]
    parameters: Mapping[str, ParameterValue]
    version: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes in a cache, key included; an estimate that is not too low."""
        size = _ENTRY_BYTES + sum(len(tensor.data) + 64 for tensor in self.outputs if tensor is not None)
        return size + sum(len(name) + len(str(value)) + 128 for name, value in self.parameters.items())


class _CachedAnswer(NamedTuple):
    answer: Answer
    num_bytes: int
    expiry_ns: int


class AnswerCache:
    """Answers by key.

    Args:
        max_bytes: Of all entries together; an answer that is larger alone is not kept.
        ttl_ms: How long an answer is given; 0: until it is evicted.
        clock_ns: What time is measured on.
        stale_ms: How long after that ``get_stale`` still gives it.
    """

    def __init__(self, max_bytes: int, ttl_ms: int, clock_ns: Callable[[], int], stale_ms: int = 0) -> None:
        self._max_bytes = max_bytes
        self._ttl_ns = ttl_ms * 1_000_000
        self._stale_ns = stale_ms * 1_000_000
        self._clock_ns = clock_ns
        self._entries: OrderedDict[bytes, _CachedAnswer] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Entries, expired ones that nobody asked for since included."""
        return len(self._entries)

    def get(self, key: bytes) -> Answer | None:
        """The answer, which is then the most recently used; None if there is none, or it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_ns and (past_ns := self._clock_ns() - entry.expiry_ns) >= 0:
            if past_ns >= self._stale_ns:
                self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def get_stale(self, key: bytes) -> Answer | None:
        """The answer, though its time may have passed, for at most ``stale_ms``; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or (self._ttl_ns and self._clock_ns() - entry.expiry_ns >= self._stale_ns):
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def put(self, key: bytes, answer: Answer) -> None:
        """The answer is kept in place of one of the same key, and as many others have gone as it needs room."""
        self._remove(key)
        num_bytes = answer.num_bytes
        if num_bytes > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        self._entries[key] = _CachedAnswer(answer, num_bytes, self._clock_ns() + self._ttl_ns)
        self.num_bytes += num_bytes

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes


def key_base(subject: Iterable[str], outputs: Iterable[str]) -> blake2b:
    """The part of a key that is the same for many requests.

    Args:
        subject: Who is asked: target, model, version.
        outputs: Names of the requested outputs, in order.
    """
    return blake2b(repr((tuple(subject), tuple(outputs))).encode(), digest_size=32)


def answer_key(base: blake2b, inputs: Iterable[tuple[str, WireTensor | None]], extra: str) -> bytes:
    """What tells requests apart; 32 bytes, about 1 ms for each MB of input.

    Args:
        base: As ``key_base`` gives it. Not modified.
        inputs: By name, in an order that is always the same; an absent one (None) differs from an empty one.
        extra: What else tells requests apart; "" for nothing.
    """
    digest = base.copy()
    for name, tensor in inputs:
        if tensor is not None:
            datatype, shape, data = tensor
            digest.update(repr((name, datatype, shape, len(data))).encode())
            digest.update(data)
    digest.update(repr(extra).encode())
    return digest.digest()
