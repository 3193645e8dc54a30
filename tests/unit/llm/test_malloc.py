"""The C library's allocator."""

import platform

import pytest

from weft.llm.runner import retain_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_glibc_takes_the_thresholds():
    """Glibc accepts both values, also a second time; it refuses those beyond its own limits."""
    assert [True, True] == [retain_freed_memory(), retain_freed_memory()]
