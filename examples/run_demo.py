"""``make demo``: build what is missing, start the mesh, ask every graph from a process of its own, stop the mesh.

The language model takes longest to build: it is trained beside everything else, and the running mesh loads it when it
is there.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console

from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh

ROOT = Path(__file__).resolve().parents[1]
BUILD = (sys.executable, str(ROOT / "model_repository" / "build.py"))
LANGUAGE_MODEL = "writer"
_CLIENT_TIMEOUT_S = 120.0
_NOTHING_TO_DO_S = 1.0  # the build of a sample that is up to date takes less


def main() -> int:
    """0 when every graph answered, else 1. The log of what failed is shown."""
    start_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log, _built(LANGUAGE_MODEL) as training:
        if subprocess.run([*BUILD, "--skip", LANGUAGE_MODEL], check=False).returncode != 0:
            return 1
        is_built = _ends_within(_NOTHING_TO_DO_S, training)
        try:
            status = _ask_everything(training, is_built=is_built, log=log)
        except (MeshError, subprocess.TimeoutExpired) as error:
            print(f"demo: {error}", file=sys.stderr)
            status = 1
        if status != 0:
            log.seek(0)
            sys.stderr.write(log.read())
            return 1
    print(f"The mesh is stopped, after {time.perf_counter() - start_s:.1f} s in all.")
    return 0


@contextmanager
def _built(sample: str) -> Iterator[subprocess.Popen[str]]:
    """The build of a sample, in a process of its own that does not outlive the block."""
    with subprocess.Popen(
        [*BUILD, "--only", sample], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _ends_within(timeout_s: float, process: subprocess.Popen[str]) -> bool:
    """Whether the process ends well so soon."""
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        return False


def _ask_everything(training: subprocess.Popen[str], *, is_built: bool, log: IO[str]) -> int:
    """Start the mesh and ask its graphs, the language model when it is trained; the exit status of the client."""
    print("Starting preprocess, model, postprocess and router ...", flush=True)
    start_s = time.perf_counter()
    arguments = () if is_built else ("--model-control-mode=poll", "--repository-poll-secs=1")
    with running_mesh(ROOT / "model_repository", arguments, log=log) as endpoints:
        url = endpoints["router"].grpc
        print(f"SERVING after {time.perf_counter() - start_s:.1f} s; the router is {url}", flush=True)
        if is_built:
            return _ask(url)
        if status := _ask(url, "--part=quick"):
            return status
        if _show_until_done(training) != 0:
            return 1
        return _ask(url, "--part=written")


def _ask(url: str, *arguments: str) -> int:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), url, *arguments]
    return subprocess.run(command, check=False, timeout=_CLIENT_TIMEOUT_S).returncode


def _show_until_done(training: subprocess.Popen[str]) -> int:
    """Show how far the training is until it ends; its exit status."""
    line = "the language model is trained"
    print(f"\n{line} ...", flush=True)
    with Console(stderr=True).status(line) as status:
        for line in training.stdout or ():
            status.update(line.rstrip())
    print(line.rstrip(), flush=True)
    return training.wait()


if __name__ == "__main__":
    sys.exit(main())
