"""The C library's allocator in a service process."""

import platform
import subprocess
import sys

import pytest

from weft.base.processes.malloc import keep_freed_memory

_PROGRAM = """
import os, resource
for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
    os.environ.pop(name, None)
from weft.base.processes.malloc import keep_freed_memory
assert keep_freed_memory()
def round_trip():
    buffers = [bytearray(b"x") * 600_000 for _ in range(8)]
    del buffers
round_trip()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round_trip()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_buffers_are_reused_without_page_faults():
    """Buffers of 600 kB that were freed are allocated again without new pages: 160 of them would be 23,000."""
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert int(ended.stdout) < 500


@pytest.mark.parametrize("variable", [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")])
def test_the_environments_choice_stays(variable: tuple[str, str]):
    """Whoever starts the process with thresholds of its own keeps them."""
    assert not keep_freed_memory(dict([variable]))
