"""``python -m benchmarks.edge``: what ``pip install 'weft-mesh[onnx]'`` takes: disk, memory, time to the first answer.

It makes a fresh virtual environment, installs this repository with the extra `onnx` from the package index, and starts
``weft edge`` over the sample model `simple`, several times. Sizes are of the installed files, in units of a million
bytes, without pip and setuptools; compiled ``__pycache__``, which pip writes by default, is told beside. Memory is the
process's after a thousand answers. The time to the first answer is judged without the time in which other programs had
the cores, of which the kernel keeps account: that is what it takes on a machine that does nothing else. For Linux on
aarch64 wheels of the same packages are asked for and unpacked: that shows that they exist and how large they are, not
that they run.

Exit status 1: a target is missed. About a minute on two cores, most of it the download and pip.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.base.core import InferCall
from weft.base.errors import WeftError
from weft.base.tensors import decode, encode
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName

ROOT = Path(__file__).resolve().parents[1]
_MODEL = ROOT / "model_repository" / "model" / "simple"

#: What only graphs with conditions need.
_CONDITIONS = "cel-expr-python"
MOST_INSTALLED_MB = 210.0
MOST_WITHOUT_CONDITIONS_MB = 150.0
MOST_RESIDENT_MB = 120.0
MOST_START_S = 1.0

_NUM_ANSWERS = 1000
_WAIT_S = 60.0
#: Libraries that the process must not have mapped.
_HEAVY = ("torch", "triton", "cel_expr", "cygrpc")
#: Tags of wheels for Linux on aarch64, from the oldest C library to that of the newest packages.
_AARCH64 = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")

_SIZES = """
import importlib.metadata, json, os
sizes = {}
for found in importlib.metadata.distributions():
    files = [found.locate_file(file) for file in found.files or () if "__pycache__" not in str(file)]
    name = found.metadata["Name"]
    if name not in ("pip", "setuptools"):
        sizes[name] = [found.version, sum(os.lstat(file).st_size for file in files if os.path.lexists(file))]
print(json.dumps(sizes))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the process, and its memory; MB are a million bytes.

    Attributes:
        ready_s: From the start of the process to the line that says that all is ready.
        answer_s: From the start to the first answer over gRPC, a new connection included.
        cpu_s: CPU time of the process until then.
        queued_s: Time in which its main thread could have run until then, and other programs had the cores.
        resident_mb, proportional_mb: RSS and PSS after a thousand answers.
        heavy: Libraries among ``_HEAVY`` that it has mapped.
    """

    ready_s: float
    answer_s: float
    cpu_s: float
    queued_s: float
    resident_mb: float
    proportional_mb: float
    heavy: list[str]


@dataclass(frozen=True, slots=True)
class Figures:
    """All of a run: installed MB and version by package, starts, and unpacked MB of wheels for aarch64."""

    sizes_mb: dict[str, tuple[str, float]]
    compiled_mb: float
    starts: list[Start]
    aarch64_mb: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edge", description="Size, memory and start of weft edge."
    )
    parser.add_argument("--starts", type=int, default=7, metavar="N", help="after a first one; default: %(default)s")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment; default: this one")
    parser.add_argument("--skip-aarch64", action="store_true", help="do not ask the index for wheels of aarch64")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write the figures into a new file there too")
    options = parser.parse_args(argv)
    if options.starts < 1:
        parser.error(f"--starts must be at least 1, got {options.starts}")
    with tempfile.TemporaryDirectory(prefix="weft-edge-") as name:
        folder = Path(name)
        environment = _install(options.python, folder / "venv")
        sizes = _sizes(environment)
        repository = _repository(folder / "models")
        _start(environment, repository)  # compiles what is imported, and fills the cache of files
        starts = [_start(environment, repository) for _ in range(options.starts)]
        compiled_mb = (
            sum(path.stat().st_size for path in environment.rglob("__pycache__/*") if "/pip/" not in str(path)) / 1e6
        )
        wheels = {} if options.skip_aarch64 else _aarch64(environment, sizes, folder / "wheels")
    figures = Figures(sizes, compiled_mb, starts, wheels)
    if options.json is not None:
        write_json(options.json, [figures], machine.describe(), prefix="edge-")
    return _report(figures)


def _install(python: str, environment: Path) -> Path:
    """A fresh environment with the package of this repository and its extra."""
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    _pip(environment, "install", "--no-compile", f"{ROOT}[onnx]")
    return environment


def _pip(environment: Path, *arguments: str) -> None:
    command = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"pip {arguments[0]} failed:\n{done.stderr}")


def _sizes(environment: Path) -> dict[str, tuple[str, float]]:
    """Version and size in MB of each installed package."""
    command = [str(environment / "bin" / "python"), "-c", _SIZES]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name: (version, size / 1e6) for name, (version, size) in found.items()}


def _repository(folder: Path) -> Path:
    """A repository with `simple` and no graph."""
    if not (_MODEL / "1" / "model.onnx").exists():
        raise SystemExit(f"{_MODEL} has no model.onnx; run `make models`")
    shutil.copytree(_MODEL, folder / "model" / "simple")
    (folder / "graphs").mkdir()
    return folder


def _start(environment: Path, repository: Path) -> Start:
    """Start the process, ask it, measure it, stop it."""
    command = [str(environment / "bin" / "weft"), "edge", "--repository", str(repository), "--router-port", "0"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--stop-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=repository,
        env=variables,
    )
    with process:
        try:
            line = cast(IO[bytes], process.stdout).readline()
            ready_s = time.perf_counter() - started_s
            if not line:
                raise SystemExit(f"weft edge ended with status {process.wait(_WAIT_S)} before it was ready")
            answered_s, cpu_s, queued_s = asyncio.run(_ask(json.loads(line)["grpc"], process.pid))
            memory = _memory_mb(process.pid)
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            cast(IO[bytes], process.stdin).close()
            process.wait(_WAIT_S)
    heavy = [name for name in _HEAVY if name in mapped]
    return Start(ready_s, answered_s - started_s, cpu_s, queued_s, memory["Rss:"], memory["Pss:"], heavy)


async def _ask(address: str, pid: int) -> tuple[float, float, float]:
    """Ask a thousand times and check each answer; moment of the first, CPU time and time queued of it until then."""
    values = np.arange(16, dtype=np.int32).reshape(1, 16)
    call = InferCall("simple", inputs={"INPUT0": encode(values), "INPUT1": encode(np.ones_like(values))})
    first = 0.0, 0.0, 0.0
    async with V2Client(address, wire=WireName.WEFT) as client:
        for index in range(_NUM_ANSWERS):
            result = await client.infer(call, timeout_s=_WAIT_S)
            if index == 0:
                first = time.perf_counter(), machine.cpu_seconds({"edge": pid})["edge"], _queued_s(pid)
            if not np.array_equal(values + 1, decode(result.outputs["OUTPUT0"])):
                raise SystemExit(f"a wrong answer: {result.outputs['OUTPUT0']}")
    return first


def _queued_s(pid: int) -> float:
    """How long the main thread has waited for a core, of ``/proc/<pid>/schedstat``: the second of its fields."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _memory_mb(pid: int) -> dict[str, float]:
    """Lines of ``smaps_rollup`` by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(kib) * 1024 / 1e6 for name, kib in (line.split()[:2] for line in lines)}


def _aarch64(environment: Path, sizes: dict[str, tuple[str, float]], folder: Path) -> dict[str, float]:
    """Unpacked MB of the wheels of the same packages for Linux on aarch64."""
    wanted = [f"{name}=={version}" for name, (version, _) in sizes.items() if name != "weft-mesh"]
    platforms = [part for tag in _AARCH64 for part in ("--platform", tag)]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        _pip(
            environment, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version",
            version, *platforms, "--dest", str(folder), *wanted,
        )  # fmt: skip
    except SystemExit as error:
        raise SystemExit(f"not every package has a wheel for Linux on aarch64: {error}") from None
    return {wheel.name.partition("-")[0]: _unpacked_mb(wheel) for wheel in folder.glob("*.whl")}


def _unpacked_mb(wheel: Path) -> float:
    with zipfile.ZipFile(wheel) as archive:
        return sum(entry.file_size for entry in archive.infolist()) / 1e6


def _report(figures: Figures) -> int:
    """Print the tables; 1 if a target is missed."""
    sizes, starts, wheels = figures.sizes_mb, figures.starts, figures.aarch64_mb
    installed_mb = sum(size for _, size in sizes.values())
    conditions_mb = sizes.get(_CONDITIONS, ("", 0.0))[1]
    answers_s = [start.answer_s for start in starts]
    own_s = [start.answer_s - start.queued_s for start in starts]
    resident_mb = max(start.resident_mb for start in starts)
    print("\n".join(machine_lines(machine.describe())))
    by_size = sorted(sizes.items(), key=lambda one: -one[1][1])
    rows = [[name, version, f"{size:.2f}"] for name, (version, size) in by_size]
    print(table([["package", "version", "MB"], *rows, ["all", "", f"{installed_mb:.1f}"]], left_columns={0, 1}))
    print(f"\ncompiled files of what was imported, beside: {figures.compiled_mb:.1f} MB\n")
    lines = [
        _line("installed, MB", installed_mb, MOST_INSTALLED_MB),
        _line(f"the same without {_CONDITIONS}, MB", installed_mb - conditions_mb, MOST_WITHOUT_CONDITIONS_MB),
        _line("resident (RSS), largest, MB", resident_mb, MOST_RESIDENT_MB),
        _line("proportional (PSS), largest, MB", max(start.proportional_mb for start in starts)),
        _line("start to ready, median, s", median(start.ready_s for start in starts)),
        _line("start to first answer, median, s", median(answers_s)),
        _line("the same without waiting for a core, median, s", median(own_s), MOST_START_S),
        _line("CPU time to first answer, median, s", median(start.cpu_s for start in starts)),
    ]
    if wheels:
        lines.append(
            _line("wheels for aarch64, unpacked, MB", sum(wheels.values()) + sizes["weft-mesh"][1], MOST_INSTALLED_MB)
        )
    heavy = sorted({name for start in starts for name in start.heavy})
    lines.append(["mapped of " + ", ".join(_HEAVY), ", ".join(heavy) or "none", "none", "MISSED" if heavy else ""])
    print(table([["", "measured", "below", ""], *lines], left_columns={0, 3}))
    return 1 if any(line[-1] for line in lines) else 0


def _line(what: str, measured: float, most: float | None = None) -> list[str]:
    is_missed = most is not None and measured >= most
    return [what, f"{measured:.2f}", "-" if most is None else f"{most:g}", "MISSED" if is_missed else ""]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, subprocess.CalledProcessError, WeftError) as error:
        sys.exit(f"benchmarks.edge: {error}")
