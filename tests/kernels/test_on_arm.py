"""CPU kernels on 64-bit ARM: compiled here for it, and run in an emulator of processors with and without ``sdot``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.on_arm import COMPILER, CPUS, EMULATOR

MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} missing; Debian: gcc-aarch64-linux-gnu, qemu-user"
    ),
]
ROOT = Path(__file__).parents[2]
#: Files of tests, and which of them the kernels run in.
FEW = {
    "products": "(test_numbers and panels and shape1) or (test_codes and (16 or NF4))",
    "cpu_kernels": "test_norm or test_activation or test_rope",
}
ALL = [
    ("products", "test_numbers and panels"),
    ("products", "test_codes"),
    ("products", "odd_numbers or outliers or not_a_number or another_order"),
    ("cpu_kernels", FEW["cpu_kernels"]),
    ("attention", "compiled or any_block_size or nan_stays or codes_cost"),
]


SETS = {"cortex-a72": "NEON", "neoverse-n1": "NEON with dotprod", "neoverse-v1": "NEON with i8mm"}


def _run(cpu: str, selected: dict[str, str]) -> None:
    files = [f"tests/kernels/test_{name}.py" for name in selected]
    chosen = " or ".join(f"(test_{name} and ({words}))" for name, words in selected.items())
    command = [sys.executable, "-m", "tests.kernels.on_arm", cpu, "-q", "-p", "no:cacheprovider", *files, "-k", chosen]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=1200, check=False)
    assert 0 == run.returncode, run.stdout[-4000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout, run.stdout


def test_some_tests_of_kernels_pass() -> None:
    """Products of numbers and codes, norms, activations and rotations pass their tests, bits of a lone row included."""
    _run("neoverse-v1", FEW)


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_has_the_instructions_of_its_name(cpu: str) -> None:
    """LLVM lists few features of ARM processors; those of products are found by what it makes of a product."""
    code = f"""
from tests.kernels.on_arm import install
install("{cpu}")
from weft_kernels.linear import instruction_sets
print(instruction_sets.NAME)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (f"{SETS[cpu]}\n", 0) == (run.stdout, run.returncode), run.stderr


@pytest.mark.long
@pytest.mark.parametrize(("name", "words"), ALL)
@pytest.mark.parametrize("cpu", CPUS)
def test_all_tests_of_kernels_pass(cpu: str, name: str, words: str) -> None:
    """Every kernel that is compiled for a CPU passes all of its tests."""
    _run(cpu, {name: words})
