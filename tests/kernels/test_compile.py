"""The kernels get through the compiler, which refuses things that the interpreter takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXPECTED = {
    *("attention", "merge_stored", "work_items", "rope_and_store", "copy_rows", "step_inputs", "linear", "rms_norm"),
    *("gate", "multiply", "sum_parts", "dequantize", "tile", "penalties", "masks", "reach", "draw", "pick"),
    *("combine", "shrink", "expand"),
}


def printed(mode: str, cache_folder: Path) -> str:
    """What ``compiled.py`` prints, where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiled.py"), mode],
        env=environment | {"TRITON_CACHE_DIR": str(cache_folder), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """Types, shapes and features of each launch are ones that the compiler knows, down to machine code."""
    assert set(printed("compile", tmp_path).split()) >= EXPECTED


def test_the_number_of_rows_compiles_nothing_anew(tmp_path):
    """Steps of 1 to 9 rows share one compiled variant of each kernel, so that none is compiled while it serves."""
    variants = dict(line.split() for line in printed("count", tmp_path).splitlines())
    assert variants.keys() >= EXPECTED - {"copy_rows", "dequantize", "combine"}
    assert dict.fromkeys(variants, "1") == variants
