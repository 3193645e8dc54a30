"""``kills``: jobs that are killed at random moments and resumed, against one that nobody disturbed."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.jobs.datasets import write_numbers, write_texts
from benchmarks.jobs.mesh import descendants, is_running, kill, parent, write_repository
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.requests import SEED
from weft.mesh.running import running_mesh

_CASE = "kills"
_JOB_TIMEOUT_S = 300.0
#: Exit statuses of a job that has come to its end; 3: rows failed, as some are to.
_DONE = (0, 3)
_END_TIMEOUT_S = 40.0
_MAX_DIFFERENCES = 10
_NOTE = (
    "SIGKILL to the job's process group at a random moment, from its start to 0.4 of the time of the undisturbed job, "
    "then --resume; where the job has a mesh of its own, in every second kill to all of its processes too; where "
    "it has not, in every fourth to a service of the long-running mesh, which restarts it. A job that ends before its "
    "kill is compared, and begun again."
)


@dataclass
class Plan:
    """One data set to kill jobs over.

    Attributes:
        graph: Graph or model.
        folder: Data set.
        bad: Rows that must fail, and what their cause must say.
        arguments: Of the job.
        num_kills: With a long-running mesh, and with a mesh of its own.
    """

    graph: str
    folder: Path
    bad: dict[int, str]
    arguments: Sequence[str]
    num_kills: tuple[int, int]


@dataclass
class Outcome:
    """What all jobs of a plan came to.

    Attributes:
        num_kills: Kills that met a running job.
        num_comparisons: Jobs that ended and were compared.
        differences: Files that differ from the undisturbed job's; rows that are lost, twice, or fail otherwise.
        left_over: Processes that a killed job left behind.
    """

    num_kills: int = 0
    num_comparisons: int = 0
    differences: list[str] = field(default_factory=list)
    left_over: list[int] = field(default_factory=list)


def measure(num_rows: int, num_texts: int, num_kills: int) -> list[Figure]:
    """Kill jobs over both data sets; one figure for each and each kind of mesh."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        own = max(2, num_kills // 10)
        most = num_kills - 2 * own
        plans = [
            Plan(
                "simple",
                root / "numbers",
                write_numbers(root / "numbers", num_rows),
                ["--rows-per-shard", "2000", "--keep", "id"],
                (most * 3 // 5, own),
            ),
            Plan(
                "embed",
                root / "texts",
                write_texts(root / "texts", num_texts),
                # In a mesh of its own a job has larger requests otherwise, and a manifest and sums that differ.
                ["--rows-per-shard", "200", "--rows-per-request", "4", "--keep", "id", "--column", "TEXT=sentence"],
                (most - most * 3 // 5, own),
            ),
        ]
        return [one for plan in plans for one in _run(plan, root)]


def _run(plan: Plan, root: Path) -> list[Figure]:
    figures = []
    draw = random.Random(f"{SEED}{plan.graph}")
    repository = write_repository(root / f"repository-{plan.graph}", plan.graph)
    whole = root / f"whole-{plan.graph}"
    with (root / "mesh.log").open("a") as log, running_mesh(repository, log=log) as endpoints:
        mesh = ["--url", endpoints["router"].grpc]
        started_s = time.perf_counter()
        _end(plan, whole, mesh)
        duration_s = time.perf_counter() - started_s
        outcome = Outcome(differences=_faults(plan, whole))
        supervisor = parent(endpoints["router"].pid)
        _kill_and_resume(
            plan, root / f"url-{plan.graph}", mesh, plan.num_kills[0], duration_s, draw, outcome, supervisor
        )
        figures += _figures(plan, "a long-running mesh", outcome)
    outcome = Outcome()
    mesh = ["--repository", str(repository)]
    _kill_and_resume(plan, root / f"own-{plan.graph}", mesh, plan.num_kills[1], duration_s, draw, outcome, 0)
    return [*figures, *_figures(plan, "its own mesh", outcome)]


def _kill_and_resume(
    plan: Plan,
    output: Path,
    mesh: list[str],
    num_kills: int,
    duration_s: float,
    draw: random.Random,
    outcome: Outcome,
    supervisor: int,
) -> None:
    """Kill until there were ``num_kills``; compare each job that ends, and begin again in another folder.

    ``supervisor`` is the process that keeps a long-running mesh running; 0: the job has a mesh of its own.
    """
    whole = output.parent / f"whole-{plan.graph}"
    round_number = 0
    folder = output.with_name(f"{output.name}-0")
    while outcome.num_kills < num_kills:
        process = _start(plan, folder, mesh)
        # A job that is resumed has less to do than the whole one; so it is killed about five times before it ends.
        wait_s = draw.uniform(0.0, 0.4 * duration_s)
        try:
            process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            outcome.num_kills += 1
            _kill(process, outcome, draw, supervisor)
            continue
        if process.returncode not in _DONE and not (folder / "manifest.json").exists():
            continue  # a job that finds no mesh does not begin
        if process.returncode not in _DONE:
            last = (folder / ".job.log").read_text().strip().splitlines()[-1:]
            outcome.differences.append(f"{folder.name}: exit status {process.returncode}: {last}")
            if len(outcome.differences) > _MAX_DIFFERENCES:
                return
            continue
        outcome.num_comparisons += 1
        outcome.differences += _differences(folder, whole)
        round_number += 1
        folder = output.with_name(f"{output.name}-{round_number}")
    _end(plan, folder, mesh)
    outcome.num_comparisons += 1
    outcome.differences += _differences(folder, whole)


def _kill(process: "subprocess.Popen[str]", outcome: Outcome, draw: random.Random, supervisor: int) -> None:
    others = descendants(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    if outcome.num_kills % 2:
        kill(others)
    if supervisor and outcome.num_kills % 4 == 0:
        kill([draw.choice(descendants(supervisor))])
    process.communicate()
    end_s = time.monotonic() + _END_TIMEOUT_S
    while (left := [pid for pid in others if is_running(pid)]) and time.monotonic() < end_s:
        time.sleep(0.05)
    outcome.left_over += left


def _start(plan: Plan, folder: Path, mesh: list[str]) -> "subprocess.Popen[str]":
    resume = ["--resume"] if (folder / "manifest.json").exists() else []
    command = [
        sys.executable, "-P", "-m", "weft.cli", "batch", plan.graph, "--input", str(plan.folder),
        "--output", str(folder), "--json", *mesh, *plan.arguments, *resume,
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    with (folder / ".job.log").open("a") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True, process_group=0)


def _end(plan: Plan, folder: Path, mesh: list[str]) -> None:
    process = _start(plan, folder, mesh)
    process.communicate(timeout=_JOB_TIMEOUT_S)
    if process.returncode not in _DONE:
        raise RuntimeError((folder / ".job.log").read_text()[-2000:])


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _differences(folder: Path, whole: Path) -> list[str]:
    own, others = _files(folder), _files(whole)
    return [f"{folder.name}/{name}" for name in sorted(own.keys() | others.keys()) if own.get(name) != others.get(name)]


def _faults(plan: Plan, folder: Path) -> list[str]:
    """Rows of an undisturbed job that are lost, there twice, or failed with another cause than they must."""
    rows = pq.read_table(folder / "rows", columns=["row"])["row"].to_pylist()
    failed = [
        json.loads(line) for path in sorted((folder / "failed").glob("*")) for line in path.read_text().splitlines()
    ]
    numbers = sorted([*rows, *(each["row"] for each in failed)])
    faults = [] if numbers == list(range(len(numbers))) and len(rows) == len(set(rows)) else ["rows lost or twice"]
    if sorted(each["row"] for each in failed) != sorted(plan.bad):
        faults.append("other rows failed than are bad")
    faults += [str(each) for each in failed if plan.bad.get(each["row"], "?") not in each["message"]]
    return faults


def _figures(plan: Plan, where: str, outcome: Outcome) -> list[Figure]:
    what = f"{plan.graph}, {where}"
    print(f"{what}: {outcome.num_kills} kills, {outcome.num_comparisons} compared", file=sys.stderr)
    for difference in outcome.differences[:5]:
        print(f"{what}: {difference}", file=sys.stderr)
    zero = Target("=", 0)
    return [
        figure(_CASE, f"{what}: kills", [outcome.num_kills], "kills", note=_NOTE),
        figure(_CASE, f"{what}: jobs compared", [outcome.num_comparisons], "jobs"),
        figure(_CASE, f"{what}: files that differ, rows lost or twice", [len(outcome.differences)], "", target=zero),
        figure(_CASE, f"{what}: processes left behind", [len(outcome.left_over)], "", target=zero),
    ]
