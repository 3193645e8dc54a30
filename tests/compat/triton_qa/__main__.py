"""``python -m tests.compat.triton_qa SERVER``: Triton Inference Server's own tests against ``weft up``, on its ports.

SERVER is a checkout of triton-inference-server/server. Models come from its generators, tests run as they are.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.compat.__main__ import is_free
from tests.compat.triton_qa import calls, operation, scheduling
from tests.compat.triton_qa.repositories import Repository, generate
from tests.compat.triton_qa.rows import NOT_RUN, Row

ROWS = (*calls.ROWS, *scheduling.ROWS, *operation.ROWS)
#: Those of HTTP, gRPC and metrics, as the tests have them.
_PORTS = (8000, 8001, 8002)
_ROOT = Path(__file__).parents[3]
_ROW_S = 1500


class Case(NamedTuple):
    """What became of one case of a row: ``passed``, ``skipped`` or ``failed``, and why."""

    name: str
    outcome: str
    why: str


class StartError(Exception):
    """The mesh did not start."""


def main() -> int:
    """Run the rows and print one table; exit status 0: nothing failed but what a row says."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.triton_qa", description=__doc__)
    parser.add_argument("server", type=Path, help="a checkout of triton-inference-server/server")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their title")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep models, repositories and logs there")
    options = parser.parse_args()
    enter_namespace()
    if not all(map(is_free, _PORTS)):
        raise SystemExit(f"the tests need the ports {_PORTS}, which are taken")
    with contextlib.ExitStack() as stack:
        work = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for source, copy in (("qa", "qa"), ("docs/examples/model_repository", "examples"), ("src/test/models", "test")):
            shutil.copytree(options.server / source, work / copy, dirs_exist_ok=True)
        generate(work / "qa" / "common", work / "generated")
        results = [
            (row, run(row, work, number))
            for number, row in enumerate(ROWS)
            if options.only in f"{row.folder} {row.title}"
        ]
    table(results, has_all=not options.only)
    return int(any(case.outcome == "failed" and not row.allows(case.name) for row, cases in results for case in cases))


def enter_namespace() -> None:
    """Start again in a network namespace, where nobody has the ports, if the machine allows it."""
    namespace = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    probe = subprocess.run([*namespace, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if probe is not None and probe.returncode == 0 and os.environ.setdefault("WEFT_QA_NAMESPACE", "0") == "0":
        os.environ["WEFT_QA_NAMESPACE"] = "1"
        os.execvp(namespace[0], [*namespace, sys.executable, "-m", "tests.compat.triton_qa", *sys.argv[1:]])


def run(row: Row, work: Path, number: int) -> list[Case]:
    """Start the mesh over the row's models and run its cases."""
    folder = work / "rows" / f"{number:03}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "qa" / row.folder, folder / row.folder, ignore=shutil.ignore_patterns("models"))
    for shared in ("common", "python_models"):
        (folder / shared).symlink_to((work / "qa" / shared).absolute())
    tests = (folder / row.folder).absolute()
    repository = tests / row.repository
    repository.mkdir(parents=True, exist_ok=True)
    row.models(Repository(repository, work / "qa", work / "generated", row.folder))
    report = (folder / "cases.jsonl").absolute()
    environment = os.environ | row.environment | {"PYTHONPATH": _path(), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["SERVER_LOG"] = str((folder / "server.log").absolute())
    command = [sys.executable, "-m", "tests.compat.triton_qa.cases", str(report), row.test, *row.cases]
    why = f"no case ran: see {folder}/tests.log"
    try:
        with mesh(folder, row) as server, (folder / "tests.log").open("wb") as log:
            environment["SERVER_PID"] = str(server)
            subprocess.run(
                command, cwd=tests, env=environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, timeout=_ROW_S, check=False,
            )  # fmt: skip
    except (StartError, subprocess.TimeoutExpired) as error:
        why = str(error)
    lines = report.read_text().splitlines() if report.exists() else []
    cases = [Case(**json.loads(line)) for line in lines] or [Case("", "failed", why)]
    counted = [case for case in cases if case.outcome != "skipped"]
    num_passed = sum(case.outcome == "passed" for case in counted)
    print(f"{row.folder} {row.title}: {num_passed} of {len(counted)}", flush=True)
    for case in cases:
        if case.outcome == "failed":
            last = (case.why.strip().splitlines() or [""])[-1][:300]
            print(f"  {case.name}: {row.allows(case.name) or f'FAILED: {last}'}", flush=True)
    return cases


def _path() -> str:
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))


@contextlib.contextmanager
def mesh(folder: Path, row: Row) -> Iterator[int]:
    """``weft up`` over the row's models, on Triton's ports; gives its process id."""
    http, grpc, metrics = map(str, _PORTS)
    command = [
        sys.executable, "-m", "weft.cli", "up", "--repository", str(folder / row.folder / row.repository),
        "--router-port", grpc, "--metrics-port", metrics, "--http-port", http, "--json", "--stop-with-stdin",
        "--start-timeout-s", "600", "--service-args=router=--server-id triton", *row.options,
    ]  # fmt: skip
    environment = os.environ | row.server_environment
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as process,
    ):
        try:
            if process.stdout is None or not process.stdout.readline():
                raise StartError(f"weft up ended with status {process.wait(10)}: see {folder}/server.log")
            yield process.pid
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()


def table(results: list[tuple[Row, list[Case]]], *, has_all: bool) -> None:
    """Print it in Markdown, as docs/triton.md has it."""
    print("\n| test | Weft | what differs |\n|---|---|---|")
    for folder in dict.fromkeys(row.folder.partition("/")[0] for row, _ in results):
        cases = [(row, case) for row, found in results if row.folder.partition("/")[0] == folder for case in found]
        counted = [(row, case) for row, case in cases if case.outcome != "skipped"]
        num_passed = sum(case.outcome == "passed" for _, case in counted)
        reasons = dict.fromkeys(row.allows(case.name) or "FAILED" for row, case in counted if case.outcome == "failed")
        print(f"| {folder} | {num_passed} of {len(counted)} | {'; '.join(reasons)} |")
    for folder, why in NOT_RUN.items() if has_all else ():
        print(f"| {folder} | not run | {why} |")


if __name__ == "__main__":
    sys.exit(main())
