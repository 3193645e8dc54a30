"""What a first run installs: the targets of make, and the extras behind them."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def dry_run(target: str, folder: Path) -> str:
    """What make would run in a clean clone."""
    command = ["make", "--dry-run", "--directory", str(folder), "--file", str(ROOT / "Makefile"), *target.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def clean_clone(folder: Path) -> Path:
    """A folder in which nothing is installed or built."""
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_text("")
    return folder


def test_the_demo_installs_neither_linters_nor_test_tools(tmp_path: Path) -> None:
    """Only `make test` and `make lint` install the extra `dev`, in which alone is Triton's compiler: a gigabyte."""
    folder = clean_clone(tmp_path)
    for target in ("demo", "models", "up"):
        text = dry_run(target, folder)
        assert re.search(r"\[(onnx|gpu),torch,transforms,samples,client,grammar\]", text)
        assert not re.search(r"\bdev\b", text)
    for target in ("test", "lint", "bench"):
        assert re.search(r"\[.*,dev\]", dry_run(target, folder))
    with_triton = [extra for extra, packages in EXTRAS.items() if any(re.match(r"triton\b", p) for p in packages)]
    assert ["dev"] == with_triton


def test_torch_without_cuda_is_enough_without_a_gpu(tmp_path: Path) -> None:
    """It comes from an index of its own, unless TORCH_INDEX is empty; without that index the default one does."""
    folder = clean_clone(tmp_path)
    text = dry_run("demo", folder)
    has_driver = Path("/proc/driver/nvidia/version").exists()
    assert has_driver != ("--index-url https://download.pytorch.org/whl/cpu torch" in text)
    assert "--index-url" not in dry_run("demo TORCH_INDEX=", folder)
