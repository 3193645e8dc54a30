"""``python -m benchmarks.tuning``: what ``weft tune`` finds, beside what is shipped and what is tuned by hand.

CPU-seconds of the whole mesh for 1000 requests, eight in work at once, of meshes that run beside each other and are
measured in turn: ratios hold on a machine that is shared, where throughput does not. Tuned by hand means the best of a
small grid of the settings that matter most: who runs in the router's process, what runs on the event loop, instances.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.requests import texts
from weft.base.signature import ModelSignature
from weft.capacity.tuning.graph_models import read_graph
from weft.capacity.tuning.load import RequestSet, from_data, generated
from weft.capacity.tuning.measurement import Bench, Comparison, Contest, Goal, TrialError, TrialLoad, parse_limit
from weft.capacity.tuning.mesh import MeshBench
from weft.capacity.tuning.space import IN_PROCESS, SEPARATE, Configuration, Machine, SearchSpace, make_space
from weft.capacity.tuning.trials import TrialRecord
from weft.capacity.tuning.tune import TuneOptions, machine, text, tune

ROOT = Path(__file__).resolve().parents[1]
#: Far above what any configuration takes: CPU decides.
SLO = "p99=5s"
CONCURRENCY = 8
NUM_TEXTS = 256
ROUNDS = 5
GRID_ROUNDS = 2
#: ``embed`` must cost so many times less than as it is shipped; the others as little as tuned by hand, but for 5 %.
MIN_GAIN, MIN_OF_HAND = 1.05, 0.95


class Figure(NamedTuple):
    """A ratio, how it ranges over the rounds, and whether its target is met."""

    name: str
    median: float
    least: float
    most: float
    target: float
    pick: str

    @property
    def is_met(self) -> bool:
        """The median counts."""
        return self.median >= self.target


class Case(NamedTuple):
    """A graph under its load.

    Attributes:
        graph: Its name.
        column: Input that ``data`` fills; "": random values.
        data: Parquet.
    """

    graph: str
    column: str
    data: str


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every target is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.tuning", description="What weft tune finds.")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--trials", type=int, default=10, metavar="N", help="of each graph (default 10)")
    parser.add_argument("--budget-s", type=float, default=1200.0, metavar="N", help="at most, for all (default 1200)")
    parser.add_argument(
        "--quick", action="store_true", help="a budget of 225 s and runs of 0.6 s: the pick may be chance"
    )
    parser.add_argument("--run-s", type=float, default=2.0, metavar="N", help="one run under load (default 2)")
    parser.add_argument("--only", choices=("embed", "digits", "simple"), help="this graph alone")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    budget_s = 225.0 if options.quick else options.budget_s
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in _cases(Path(folder), options.repository) if options.only in (None, case.graph)]
        for case in cases:
            share_s = budget_s / len(cases)
            figures.append(_measured(case, options.repository, Path(folder), share_s, options))
    if options.json:
        print(json.dumps([figure._asdict() | {"is_met": figure.is_met} for figure in figures]))
    else:
        print(f"CPU-seconds for 1000 requests, {CONCURRENCY} at once, times better; {machine()}")
        for figure in figures:
            print(
                f"{figure.name:<32}{figure.median:>6.2f} ({figure.least:.2f} to {figure.most:.2f}), target "
                f"{figure.target:.2f}: {'met' if figure.is_met else 'MISSED'}; {figure.pick}"
            )
    return 0 if all(figure.is_met for figure in figures) else 1


def _cases(folder: Path, repository: Path) -> list[Case]:
    sentences, pictures = folder / "texts.parquet", folder / "pictures.parquet"
    pq.write_table(pa.table({"TEXT": texts(NUM_TEXTS)}), sentences)
    images = [path.read_bytes() for path in sorted((repository / "data" / "digits").glob("*.png"))]
    pq.write_table(pa.table({"IMAGE": pa.array(images, pa.binary())}), pictures)
    return [Case("embed", "TEXT", str(sentences)), Case("digits", "IMAGE", str(pictures)), Case("simple", "", "")]


def _measured(case: Case, repository: Path, folder: Path, budget_s: float, asked: argparse.Namespace) -> Figure:
    run_s = 0.6 if asked.quick else asked.run_s
    start_s = time.monotonic()
    graph = read_graph(case.graph, repository)
    space = make_space(list(graph.models.values()), Machine(len(os.sched_getaffinity(0)), 50.0))
    goal = Goal((parse_limit(SLO),), "cpu")
    contest = Contest(goal, TrialLoad(levels_vary=False, level=CONCURRENCY, duration_s=run_s))
    own = folder / f"bench-{case.graph}"
    own.mkdir()
    bench = MeshBench(graph, space, own, make_requests=partial(_requests, case), warm_up_s=run_s)
    with closing(bench):
        by_hand = None if case.graph == "embed" else _by_hand(space, bench, contest)
    reserve_s = 0.0 if by_hand is None else 2 * ROUNDS * run_s + (time.monotonic() - start_s) / 4
    options = TuneOptions(
        graph=case.graph,
        limits=goal.limits,
        study=folder / f"study-{case.graph}",
        repository=repository,
        objective="cpu",
        data=case.data,
        concurrency=CONCURRENCY,
        budget_s=max(budget_s - (time.monotonic() - start_s) - reserve_s, 20.0),
        num_trials=asked.trials,
        run_s=run_s,
        num_confirmations=ROUNDS,
    )
    outcome = tune(options, _show)
    print(text(outcome.facts), file=sys.stderr)
    pick = {**space.shipped, **{key: change["to"] for key, change in outcome.facts["pick"]["changes"].items()}}
    if by_hand is None:
        gain: Mapping[str, Any] = (outcome.facts["confirmation"] or {}).get("gains", {}).get("cpu", {})
        figures = [gain.get(name, 1.0) for name in ("median", "least", "most")]
        return Figure(f"{case.graph}, as it is shipped", *figures, MIN_GAIN, _changes(space, pick))
    with closing(bench):
        found = _beside(bench, contest, by_hand, pick)
    gains = found.gains["cpu"]
    name = f"{case.graph}, tuned by hand"
    shown = f"{_changes(space, pick)}; by hand {_changes(space, by_hand)}"
    return Figure(name, found.gain("cpu"), min(gains), max(gains), MIN_OF_HAND, shown)


def _requests(case: Case, signature: ModelSignature) -> RequestSet:
    if not case.column:
        return generated(signature, rows=1, seed=0)
    return from_data(signature, case.data, column_of={}, rows=1, recorded=False)


def _by_hand(space: SearchSpace, bench: Bench, contest: Contest) -> Configuration:
    """The best of a grid, each beside what is shipped."""
    shipped = space.shipped
    inline = {key: "inline" for key in shipped if key.endswith(".execution")}
    several = {key: 2 for key in shipped if key.endswith(".instances")}
    fused = space.settings[IN_PROCESS].choices[-1]
    best, best_gain = shipped, 1.0
    with closing(bench.open(shipped)) as old:
        for process, execution, instances in itertools.product((SEPARATE, fused), ({}, inline), ({}, several)):
            configuration = space.canonical({**shipped, IN_PROCESS: process, **execution, **instances})
            if (execution and instances) or not space.changes(configuration):
                continue
            try:
                with closing(bench.open(configuration)) as new:
                    gain = contest.compare(old, CONCURRENCY, new, CONCURRENCY, GRID_ROUNDS).gain("cpu")
            except TrialError as error:
                print(f"by hand: {_changes(space, configuration)}: {error}", file=sys.stderr)
                continue
            print(f"by hand: {_changes(space, configuration)}: {gain:.2f} times better", file=sys.stderr)
            if gain > best_gain:
                best, best_gain = configuration, gain
    return best


def _beside(bench: Bench, contest: Contest, hand: Configuration, pick: Configuration) -> Comparison:
    with closing(bench.open(hand, fresh=True)) as old, closing(bench.open(pick, fresh=True)) as new:
        return contest.compare(old, CONCURRENCY, new, CONCURRENCY, ROUNDS)


def _changes(space: SearchSpace, configuration: Configuration) -> str:
    changes = ", ".join(f"{key} {new}" for key, (_, new) in space.changes(configuration).items())
    return changes or "as it is shipped"


def _show(record: TrialRecord, space: SearchSpace) -> None:
    gain = record.gains.get("cpu")
    shown = f"{gain:.2f} times better than what is shipped" if gain else record.reason
    print(f"tune: {record.outcome}: {_changes(space, record.configuration)}: {shown}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
