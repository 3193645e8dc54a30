"""Values that are asked for again when some time has passed."""

import pytest

from weft.base.caching.response_cache import ExpiringCache


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
