"""``python -m tests.compat EXAMPLES``: run tritonclient's example programs as they are against ``weft up``."""

import argparse
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image
from tests.compat.examples import EXAMPLES, IMAGE, Example

MODELS = Path(__file__).parent / "models"
#: Longest time of one program, in seconds.
PROGRAM_S = 120
_SHOWN_LINES = 12
#: Where programs without ``--url`` call.
_FIXED_PORTS = (8000, 8001)


def main() -> int:
    """Run them and print one table; exit status 0: none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("examples", type=Path, help="the folder src/python/examples of triton-inference-server/client")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their name")
    options = parser.parse_args()
    wanted = [example for example in EXAMPLES if options.only in example.name]
    unknown = sorted({path.stem for path in options.examples.glob("*.py")} - {example.name for example in EXAMPLES})
    rows: list[tuple[str, str, str]] = [(name, "not run", "is not in tests/compat/examples.py") for name in unknown]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.png"
        Image.fromarray(np.full((240, 320, 3), (200, 120, 40), np.uint8)).save(image)
        ordered = sorted(wanted, key=repository_of, reverse=True)
        for (models, is_explicit), group in groupby(ordered, repository_of):
            with mesh(models, is_explicit=is_explicit) as (grpc, http, has_fixed_ports):
                for example in group:
                    title = " ".join((example.name, *example.arguments)).replace(IMAGE, "image.png")
                    reason = example.not_run
                    if not example.has_url and not has_fixed_ports:
                        reason = f"its ports, {_FIXED_PORTS[0]} and {_FIXED_PORTS[1]}, are taken"
                    if not (options.examples / f"{example.name}.py").exists():
                        reason = "the checkout does not have it"
                    if reason:
                        rows.append((title, "not run", reason))
                        continue
                    begin_s = time.monotonic()
                    said = run(options.examples, example, http if example.http else grpc, image)
                    result = "passed" if said is None else "limited" if is_limit(example, said) else "FAILED"
                    note = example.limit if result == "limited" else f"{time.monotonic() - begin_s:.1f} s"
                    rows.append((title, result, note))
                    print(f"{result:8} {title}", flush=True)
                    if result == "FAILED":
                        failures.append(f"--- {title}\n{said}")
    width = max(len(title) for title, _, _ in rows)
    print(*failures, sep="\n")
    print(*(f"{title:{width}}  {result:8} {note}" for title, result, note in sorted(rows)), sep="\n")
    counts = Counter(result for _, result, _ in rows)
    print(", ".join(f"{counts[result]} {result.lower()}" for result in ("passed", "FAILED", "limited", "not run")))
    return int(bool(failures))


def is_limit(example: Example, said: str) -> bool:
    """Whether a program failed with what is known not to be done, and nothing else."""
    return bool(example.limit) and example.fails_with in said


def repository_of(example: Example) -> tuple[tuple[str, ...], bool]:
    """What the repository has, and whether models are loaded and unloaded by name."""
    return example.models, example.is_explicit


@contextlib.contextmanager
def mesh(models: Sequence[str], *, is_explicit: bool) -> Iterator[tuple[str, str, bool]]:
    """``weft up`` over these models; addresses of gRPC and HTTP, and whether they are 8001 and 8000."""
    has_fixed_ports = all(map(is_free, _FIXED_PORTS))
    explicit = ["--model-control-mode=explicit", "--load-model=*"] if is_explicit else []
    http_port, grpc_port = _FIXED_PORTS if has_fixed_ports else (0, 0)
    with tempfile.TemporaryDirectory() as repository:
        for model in models:
            shutil.copytree(MODELS / model, Path(repository) / model)
        command = [
            sys.executable, "-m", "weft.cli", "up", "--repository", repository, "--router-port", str(grpc_port),
            "--metrics-port", "0", "--http-port", str(http_port), "--json", "--stop-with-stdin",
            "--service-args=router=--server-id triton --allow-client-shm", "--service-args=model=--allow-client-shm",
            *explicit,
        ]  # fmt: skip
        log = Path(repository).with_suffix(".log")
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            try:
                line = process.stdout.readline() if process.stdout is not None else ""
                if not line:
                    raise SystemExit(f"weft up ended with status {process.wait(10)}:\n{log.read_text()[-4000:]}")
                endpoints = json.loads(line)
                yield endpoints["router"]["grpc"], endpoints["gateway"]["http"], has_fixed_ports
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            finally:
                process.kill()
                log.unlink()


def run(folder: Path, example: Example, address: str, image: Path) -> str | None:
    """The end of what a program said if it failed; None: it passed."""
    arguments = [str(image) if argument == IMAGE else argument for argument in example.arguments]
    url = ["--url", address] if example.has_url else []
    command = [sys.executable, str(folder / f"{example.name}.py"), *url, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {PROGRAM_S} s"
    said = (done.stdout + done.stderr).splitlines()
    if done.returncode == 0 and not any(line.startswith("FAILED") for line in said):
        return None
    return "\n".join([f"status {done.returncode}", *said[-_SHOWN_LINES:]])


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
