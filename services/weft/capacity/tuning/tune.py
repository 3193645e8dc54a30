"""``tune``: searches the settings of a graph on this machine, writes the best, and reports."""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import unified_diff
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.signature import ModelSignature
from weft.capacity.machine.profile import cpu_model
from weft.capacity.tuning.config_text import with_head
from weft.capacity.tuning.graph_models import TunedGraph, check_output, read_graph, write_copy, write_in_place
from weft.capacity.tuning.load import RequestSet, from_data, generated, open_data
from weft.capacity.tuning.measurement import OBJECTIVES, Contest, Goal, LatencyLimit, Measurement, TrialLoad
from weft.capacity.tuning.mesh import MeshBench
from weft.capacity.tuning.search import Search, SearchResult
from weft.capacity.tuning.space import IN_PROCESS, Configuration, Machine, SearchSpace, make_space
from weft.capacity.tuning.trials import Study, TrialRecord, pareto
from weft.jobs.atomic_files import check_writable, held, replace_file

_TRIALS, _REPORT = "trials.log", "report.json"
_MARKER = "weft tune: "
#: Requests in work at once, for each core, at which the search for the most load begins.
_FIRST_LEVEL_PER_CORE = 4
#: Interpreter, allocator and adaptive batches settle in so many seconds.
_MIN_WARM_UP_S = 0.5


@dataclass(frozen=True)
class TuneOptions:
    """Options of ``weft tune``.

    Attributes:
        recorded: Data set with a column ``at_s``, rows sent as they arrived; "": none.
        rate_per_s: Planned arrivals a second; 0: none, or as recorded.
        concurrency: Requests in flight; 0: four for each core, and for throughput as many as keep the limits.
    """

    graph: str
    limits: tuple[LatencyLimit, ...]
    study: Path
    repository: Path = Path("model_repository")
    objective: str = "throughput"
    resume: bool = False
    data: str = ""
    recorded: str = ""
    column_of: Mapping[str, str] = field(default_factory=dict)
    rows_per_request: int = 1
    rate_per_s: float = 0.0
    concurrency: int = 0
    num_trials: int = 30
    budget_s: float = 600.0
    run_s: float = 2.0
    num_confirmations: int = 5
    sampler: str = "nsga2"
    seed: int = 0
    write: bool = False
    output: Path | None = None


class TuneOutcome(NamedTuple):
    """Result: facts as in ``report.json``, changed configurations as a unified diff, files written."""

    facts: Mapping[str, Any]
    diff: str
    files: list[Path]


def tune(options: TuneOptions, on_trial: Callable[[TrialRecord, SearchSpace], None] = lambda *_: None) -> TuneOutcome:
    """Search, and write what ``options`` ask for.

    If interrupted, also by KeyboardInterrupt, it leaves the repository unchanged and a study that can be resumed.

    Raises:
        WeftError: The graph or an option is wrong, or the shipped configuration cannot be measured.
        OSError: A file cannot be read or written.
    """
    graph = read_graph(options.graph, options.repository)
    if options.output is not None:
        check_output(options.output, options.repository)
    if path := options.recorded or options.data:
        open_data(path, "--recorded" if options.recorded else "--data")  # what is wrong with it, before a mesh starts
    num_cores = len(os.sched_getaffinity(0))
    space = make_space(list(graph.models.values()), Machine(num_cores, min(limit.limit_ms for limit in options.limits)))
    if options.write:
        folders = {(model.folder / CONFIG_FILENAME).resolve().parent for model in space.models.values()}
        check_writable(sorted(folders), "--output DIR writes a copy of the repository")
    goal = Goal(options.limits, options.objective)
    is_open = bool(options.rate_per_s or options.recorded)
    load = TrialLoad(
        # CPU time and latency are compared under one load: both depend on it more than on most settings.
        levels_vary=not (is_open or options.concurrency) and options.objective == "throughput",
        level=0 if is_open else options.concurrency or _FIRST_LEVEL_PER_CORE * num_cores,
        duration_s=options.run_s,
    )
    with held(options.study):
        has_trials = (options.study / _TRIALS).exists()
        if has_trials and not options.resume:
            raise InvalidArgumentError(
                f"'{options.study}' has a study already; --resume goes on with it, --study names another folder"
            )
        if options.resume and not has_trials:
            raise NotFoundError(
                f"'{options.study}' has no study to go on with; leave --resume out, or name another --study"
            )
        setup = _setup(options, graph, load)
        trials = Study(options.study / _TRIALS, space, seed=options.seed, sampler=options.sampler, setup=setup)
        bench = MeshBench(
            graph,
            space,
            options.study,
            make_requests=lambda signature: _requests(options, signature),
            rate_per_s=options.rate_per_s,
            warm_up_s=max(options.run_s / 2, _MIN_WARM_UP_S),
            seed=options.seed,
        )
        search = Search(
            space,
            bench,
            Contest(goal, load),
            trials,
            num_trials=options.num_trials,
            budget_s=options.budget_s,
            num_confirmations=options.num_confirmations,
            clock_s=time.monotonic,
            on_trial=lambda record: on_trial(record, space),
        )
        try:
            with closing(bench):
                result = search.run()
        finally:
            if not trials.records:  # nothing to go on with
                (options.study / _TRIALS).unlink(missing_ok=True)
        setup["load"] = _load_text(options, load)
        setup["requests"] = bench.requests.source if bench.requests is not None else ""
        facts = setup | _facts(space, goal, trials.records, result)
        _keep(options, facts)  # also if the configurations cannot be written
        outcome = _write(options, graph, space, result, facts)
        _keep(options, outcome.facts)
        return outcome


def _keep(options: TuneOptions, found: Mapping[str, Any]) -> None:
    replace_file(options.study / _REPORT, (json.dumps(found, indent=2) + "\n").encode())


def _write(
    options: TuneOptions, graph: TunedGraph, space: SearchSpace, result: SearchResult, found: dict[str, Any]
) -> TuneOutcome:
    texts = space.texts(result.pick)
    shown: list[str] = []
    for name, new in texts.items():
        old, path = space.models[name].text, str(space.models[name].folder / CONFIG_FILENAME)
        shown += unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), path, path)
    files: list[Path] = []
    if texts and result.confirmation is not None:
        line = _provenance(found, datetime.now(UTC).date().isoformat())
        texts = {name: with_head(text, _MARKER, line) for name, text in texts.items()}
        if options.write:
            files += write_in_place(graph, texts)
    if options.output is not None:
        files += write_copy(graph, texts, options.output)
    return TuneOutcome({**found, "files": [str(path) for path in files]}, "".join(shown), files)


def _load_text(options: TuneOptions, load: TrialLoad) -> str:
    if options.rate_per_s:
        return f"{options.rate_per_s:g} requests a second"
    if options.recorded:
        return "arrivals as recorded"
    return f"{load.level} requests at once{', more or fewer as the limits allow' * load.levels_vary}"


def _requests(options: TuneOptions, signature: ModelSignature) -> RequestSet:
    most, rows = signature.max_batch_size or 1, options.rows_per_request
    if rows > most:
        raise InvalidArgumentError(
            f"--rows-per-request must be from 1 to {most}, the largest batch of '{signature.name}', got {rows}"
        )
    if path := options.recorded or options.data:
        is_recorded = bool(options.recorded)
        return from_data(signature, path, column_of=options.column_of, rows=rows, recorded=is_recorded)
    return generated(signature, rows=rows, seed=options.seed)


def _setup(options: TuneOptions, graph: TunedGraph, load: TrialLoad) -> dict[str, Any]:
    """Settings that trials depend on, so that results of different setups do not mix."""
    digest = hashlib.sha256()
    for folder in sorted(graph.folders):
        for file in sorted((graph.repository / folder).rglob("*.pbtxt")):
            digest.update(file.read_bytes())
    return {
        "graph": options.graph,
        "slo": [str(limit) for limit in options.limits],
        "objective": options.objective,
        "load": [load.level, load.levels_vary, options.rate_per_s],
        "requests": [options.recorded or options.data, options.rows_per_request],
        "configurations": digest.hexdigest(),
    }


def machine() -> str:
    """CPU and cores of this machine."""
    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def _facts(space: SearchSpace, goal: Goal, records: list[TrialRecord], result: SearchResult) -> dict[str, Any]:
    """All results of a search, as plain values for JSON."""

    def changes(configuration: Configuration) -> dict[str, dict[str, Any]]:
        return {key: {"from": old, "to": new} for key, (old, new) in space.changes(configuration).items()}

    def measurement(measured: Measurement) -> dict[str, Any]:
        return {
            "concurrency": measured.level,
            "throughput_per_s": measured.throughput_per_s,
            "cpu_s_per_1000": measured.cpu_s_per_1000,
            "latency_ms": measured.latencies(),
            "violations": goal.violations(measured),
        }

    front = pareto(records)
    confirmation = None
    if (found := result.confirmation) is not None:
        gains = {
            name: {"median": median(values), "least": min(values), "most": max(values)}
            for name, values in found.gains.items()
        }
        confirmation = {"rounds": len(found.pairs), "gains": gains}
        confirmation |= {"shipped": measurement(found.old), "pick": measurement(found.new)}
    return {
        "machine": machine(),
        "num_configurations": space.size,
        "trials": [
            {
                "number": number,
                "outcome": record.outcome,
                "reason": record.reason,
                "changes": changes(record.configuration),
                "concurrency": record.level,
                "values": dict(record.values),
                "gains": dict(record.gains),
                "latency_ms": dict(record.latency_ms),
            }
            for number, record in enumerate(records)
        ],
        "pareto": [number for number, record in enumerate(records) if record in front],
        "pick": {
            "changes": changes(result.pick),
            "mesh_arguments": space.mesh_arguments(result.pick),
            "why": result.why,
        },
        "confirmation": confirmation,
    }


def _provenance(found: Mapping[str, Any], date: str) -> str:
    """Comment for the head of a configuration: what it was tuned for, where, and the gain."""
    gains = found["confirmation"]["gains"]
    shown = ", ".join(f"{name} {gains[name]['median']:.2f} times as good" for name in OBJECTIVES)
    arguments = " ".join(found["pick"]["mesh_arguments"])
    return (
        f"{found['graph']}, {', '.join(found['slo'])}, for {found['objective']}, {date}, {found['machine']}: {shown} "
        f"as before{f', with weft up {arguments}' if arguments else ''}"
    )


def text(found: Mapping[str, Any]) -> str:
    """Human-readable results: the Pareto set, the pick, and its gains."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    percentile = found["slo"][0].partition("=")[0]
    yield f"{found['graph']}: {', '.join(found['slo'])}; {found['load']}; {found['requests']}; {found['machine']}"
    outcomes = Counter(trial["outcome"] for trial in found["trials"])
    yield f"{len(found['trials'])} trials: {', '.join(f'{count} {name}' for name, count in outcomes.items())}"
    yield ""
    yield f"{'trial':>5} {'requests/s':>11} {'CPU-s/1000':>11} {percentile + ' ms':>9}  changes"
    for number in found["pareto"]:
        trial = found["trials"][number]
        values = trial["values"]
        yield (
            f"{number:>5} {values['throughput']:>11.1f} {values['cpu']:>11.3f} {values['latency']:>9.2f}  "
            f"{_shown(trial['changes'])}"
        )
    yield ""
    pick = found["pick"]
    yield f"pick: {_shown(pick['changes'])} ({pick['why']})"
    if confirmation := found["confirmation"]:
        gains = ", ".join(
            f"{name} {gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
            for name, gain in confirmation["gains"].items()
        )
        yield f"against what is shipped, {confirmation['rounds']} rounds in turn, times as good: {gains}"
    if pick["mesh_arguments"]:
        yield f"start it with: weft up {' '.join(pick['mesh_arguments'])}"


def _shown(changes: Mapping[str, Mapping[str, Any]]) -> str:
    ordered = sorted(changes.items(), key=lambda item: item[0] != IN_PROCESS)
    return ", ".join(f"{key} {change['to']}" for key, change in ordered) or "as it is shipped"
