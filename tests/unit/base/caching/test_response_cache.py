"""Caches with a time to live."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.caching import CachedResponse, ExpiringCache, ResponseCache, cache_key, cache_key_base
from weft.base.tensors import WireTensor


class Clock:
    """Time that stands still until it is told."""

    now_ns = 5

    def __call__(self) -> int:
        return self.now_ns


def answer(num_bytes: int, value: bytes = b"x") -> CachedResponse:
    return CachedResponse((WireTensor("UINT8", (num_bytes,), value * num_bytes),), {})


def test_the_least_recently_used_answer_goes_first() -> None:
    """As many go as the new one needs room; to be asked for counts as use."""
    size = answer(1000).num_bytes
    cache = ResponseCache(3 * size, 0, Clock())
    for key in (b"a", b"b", b"c"):
        cache.put(key, answer(1000))
    cache.get(b"a")
    cache.put(b"d", answer(1000))
    assert [True, False, True, True] == [cache.get(key) is not None for key in (b"a", b"b", b"c", b"d")]
    assert 3 * size == cache.num_bytes
    cache.put(b"e", answer(1900))
    assert [False, False, True, True] == [cache.get(key) is not None for key in (b"a", b"c", b"d", b"e")]


def test_an_answer_larger_than_the_cache_is_not_kept() -> None:
    """Nothing else goes for it, but an older answer of the same request does."""
    cache = ResponseCache(2000, 0, Clock())
    cache.put(b"a", answer(100))
    cache.put(b"b", answer(100))
    cache.put(b"b", answer(10_000))
    assert [True, False] == [cache.get(key) is not None for key in (b"a", b"b")]
    assert (1, answer(100).num_bytes) == (len(cache), cache.num_bytes)


def test_an_answer_is_given_until_its_time_is_over() -> None:
    """Measured from when it was put; then its memory is free. Without a time to live it stays until it is evicted."""
    clock = Clock()
    cache, lasting = ResponseCache(10_000, 2, clock), ResponseCache(10_000, 0, clock)
    for each in (cache, lasting):
        each.put(b"a", answer(100))
    clock.now_ns += 1_999_999
    assert answer(100) == cache.get(b"a")
    clock.now_ns += 1
    assert cache.get(b"a") is None
    assert (0, 0) == (len(cache), cache.num_bytes)
    clock.now_ns += 10**18
    assert answer(100) == lasting.get(b"a")


def test_all_of_an_answer_counts_as_memory() -> None:
    """Its tensors, and its parameters: a model that answers in these cannot fill the memory unseen."""
    assert answer(100).num_bytes - answer(0).num_bytes == 100
    assert CachedResponse((None,), {}).num_bytes > 0
    cache = ResponseCache(10_000, 0, Clock())
    cache.put(b"a", CachedResponse((), {"text": "x" * 20_000}))
    assert 0 == len(cache)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(0, 3000), st.booleans())))
def test_memory_is_never_exceeded_and_never_lost(steps: list[tuple[bytes, int, bool]]) -> None:
    """What the cache says it holds is the sum of what it gives."""
    cache = ResponseCache(4000, 0, Clock())
    for key, num_bytes, is_put in steps:
        if is_put:
            cache.put(key, answer(num_bytes))
        else:
            cache.get(key)
        kept = [found.num_bytes for key in (b"a", b"b", b"c", b"d") if (found := cache.get(key)) is not None]
        assert (sum(kept), len(kept)) == (cache.num_bytes, len(cache))
        assert 4000 >= cache.num_bytes


BASE: dict[str, Any] = {
    "subject": ("target", "model", "1"),
    "outputs": ("A", "B"),
    "inputs": (("X", WireTensor("UINT8", (2,), b"ab")), ("Y", None)),
    "extra": "",
}


def key(request: Mapping[str, Any]) -> bytes:
    return cache_key(cache_key_base(request["subject"], request["outputs"]), request["inputs"], request["extra"])


@pytest.mark.parametrize(
    "change",
    [
        {"subject": ("target", "model", "2")},
        {"subject": ("target", "mode", "l1")},
        {"outputs": ("A",)},
        {"outputs": ("B", "A")},
        {"outputs": ("AB",)},
        {"inputs": (("X", WireTensor("UINT8", (2,), b"ac")), ("Y", None))},
        {"inputs": (("X", WireTensor("UINT8", (1, 2), b"ab")), ("Y", None))},
        {"inputs": (("X", WireTensor("INT8", (2,), b"ab")), ("Y", None))},
        {"inputs": (("Z", WireTensor("UINT8", (2,), b"ab")), ("Y", None))},
        {"inputs": (("X", WireTensor("UINT8", (2,), b"ab")), ("Y", WireTensor("UINT8", (0,), b"")))},
        {"inputs": (("X", None), ("Y", WireTensor("UINT8", (2,), b"ab")))},
        {"extra": "1"},
        {"extra": "''"},
        {"extra": "\ud800"},
    ],
    ids=repr,
)
def test_requests_that_differ_have_keys_that_differ(change: dict[str, Any]) -> None:
    """In anything that the answer may depend on, however their parts are cut; equal requests have one."""
    inputs = (("X", WireTensor("UINT8", (2,), bytes(bytearray(b"ab")))), ("Y", None))
    assert (key(BASE), 32) == (key(BASE | {"inputs": inputs}), len(key(BASE)))
    assert key(BASE) != key(BASE | change)


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_data_that_looks_like_a_further_input_is_none(num_bytes: int) -> None:
    """The length of the data is part of the key."""
    forged = repr(("Y", "BYTES", (1,), num_bytes)).encode()
    one = (("X", WireTensor("BYTES", (1,), b"d" + forged + b"e")), ("Y", None))
    two = (("X", WireTensor("BYTES", (1,), b"d")), ("Y", WireTensor("BYTES", (1,), b"e")))
    assert key(BASE | {"inputs": one}) != key(BASE | {"inputs": two})


async def test_a_value_is_asked_for_once_until_it_expires() -> None:
    """None is a value; what raises is asked for again; the oldest make room."""
    now_s, asked = [0.0], list[str]()
    cache = ExpiringCache[str, str | None](2.0, 2, lambda: now_s[0])

    async def value(key: str) -> str | None:
        async def ask() -> str | None:
            asked.append(key)
            if key == "bad":
                raise ValueError(key)
            return None if key == "none" else key

        return await cache.get(key, ask)

    assert [None, None, "a"] == [await value(key) for key in ("none", "none", "a")]
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            await value("bad")
    assert ["none", "a", "bad", "bad"] == asked
    now_s[0] = 2.0
    assert "a" == await value("a")
    assert "b" == await value("b")
    assert (2, ["a", "b"]) == (len(cache), asked[4:])
    assert "a" == await value("a")
    assert None is await value("none")
    assert ["none"] == asked[6:]
