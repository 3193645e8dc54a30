"""A model made smaller and faster behind an accuracy gate: ``optimize``."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import suggestion
from weft.jobs.layout import make_layout
from weft.optimize.candidates import Candidates, Material, quiet
from weft.optimize.cost import OBJECTIVES, CostMeter, objective_ratio
from weft.optimize.gate import GateCandidate, pick
from weft.optimize.methods import METHODS
from weft.optimize.methods.method import Inputs, OptimizationMethod
from weft.optimize.metrics import make_metric
from weft.optimize.metrics.metric import MetricOptions
from weft.optimize.recording import recording_mesh
from weft.optimize.report import CandidateReport, Report
from weft.optimize.repository.graphs import check_pinned, choose_graph, graphs_that_call
from weft.optimize.repository.provenance import noted_versions, with_provenance
from weft.optimize.repository.publishing import check_publishable, held_model, publish
from weft.optimize.repository.source import RepositoryModel, find_model, model_files, sha256_of
from weft.optimize.rows import read_rows
from weft.optimize.trial_mesh import TrialMesh

_PREFIX = "weft-optimize-"
#: A younger folder without a lock may be one whose run has yet to lock it, in seconds.
_MIN_AGE_S = 60.0


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder that lasts as long as the block; its lock tells others that the run lives. Raises OSError."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, _locked(Path(name)):
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # held, another user's, or gone meanwhile
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _MIN_AGE_S:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def config_with_note(model: RepositoryModel, number: int, report: Report, best: CandidateReport, files: Path) -> str:
    """Text of ``config.pbtxt`` with the new version's note.

    Raises:
        InvalidArgumentError: The text cannot be extended.
        OSError: A file cannot be read.
    """
    return with_provenance(
        model.text,
        number,
        f"from version {model.version} by {best.method}, {report.created[:10]}; weft optimize wrote this note.",
        _facts(model, report, best, files),
        best.parameters,
    )


def _facts(model: RepositoryModel, report: Report, best: CandidateReport, files: Path) -> dict[str, object]:
    loss = best.loss
    return {
        "method": best.method,
        "notes": best.notes,
        "source_version": report.version,
        "source_sha256": sha256_of(model.source.file),
        "sha256": sha256_of(files / model.source.file.name),
        "data": report.data,
        "data_sha256": report.data_sha256,
        "calibration_rows": report.num_calibration_rows,
        "held_out_rows": report.num_held_out_rows,
        "seed": report.seed,
        "graph": report.graph,
        "metric": report.metric,
        "loss": None if loss is None else round(loss.value, 6),
        "loss_interval_95": None if loss is None else [round(loss.low, 6), round(loss.high, 6)],
        "max_loss": report.max_loss,
        "objective": report.objective,
        "time_ratio": {str(rows): round(cost.time_ratio, 3) for rows, cost in best.costs.items()},
        "busy_time_ratio": {str(rows): round(cost.busy_time_ratio, 3) for rows, cost in best.costs.items()},
        "cpu_time_ratio": {str(rows): round(cost.ratio, 3) for rows, cost in best.costs.items()},
        "created": report.created,
        "software": dict(report.software),
    }


def advice(model: RepositoryModel, number: int, best: CandidateReport) -> list[str]:
    """Sentences on who gets the new version, when, and how to go back."""
    before, after = model.serves(model.versions), model.serves([*model.versions, number])
    if number not in after:
        first = f"version_policy does not name version {number}: it is not served until you add it."
    elif gone := [str(version) for version in before if version not in after]:
        first = (
            f"By version_policy, version {number} is served in place of version {', '.join(gone)}; "
            "version_policy { all { } } keeps both."
        )
    else:
        kept = ", ".join(map(str, before))
        first = f"Version {number} answers requests that name no version; version {kept} is served too."
    sentences = [
        first,
        "A mesh with --model-control-mode poll takes it over by itself, any other after `weft restart`. To go back, "
        f"remove the folder {model.folder / str(number)}.",
    ]
    if best.parameters:
        names = ", ".join(f"{key} = {value}" for key, value in best.parameters.items())
        sentences.append(f"config.pbtxt gets {names}, which holds for all versions of the model.")
    return sentences


#: Rows of the larger of the two requests whose cost is measured.
_COST_ROWS = 32
_SOFTWARE = ("weft", "onnx", "onnxruntime", "onnxruntime-gpu", "torch")


@dataclass(frozen=True)
class OptimizeOptions:
    """What to optimise, and how to judge it.

    Attributes:
        model: Its name.
        data: Path or pattern of the user's data.
        max_loss: What the upper end of the loss's interval may be, as a share.
        repository: Model repository.
        version: Of the model; None: the highest that is served.
        graph: That the data goes through, NAME or NAME/VERSION; "": the only one that calls the model, or straight to
            the model where none does; the model's own name: straight to the model.
        methods: Names; none: all.
        metric: Name, or ``FILE.py:function``; "": what suits the graph.
        output: Of the graph, that is judged; "": the only one that the metric can judge.
        label: Column with the right answer; "": none.
        positive: Column with the text to find; of the metric ``retrieval``.
        column_of: Column of an input, where it has another name.
        format: Of the data; "": by suffix.
        num_calibration, num_held_out: Rows, at most.
        seed: Of the split and the interval.
        num_rounds: In which each cost is measured, a candidate and the original in turn.
        objective: What the new version has to be faster in: ``latency``, the time of a request with one row, or
            ``throughput``, rows a second where requests have 32 rows, or as many as the graph takes.
        timeout_s: Of a request.
        is_dry_run: Nothing is written.
        log: Gets what the services log; None: nowhere.
    """

    model: str
    data: str
    max_loss: float
    repository: Path = Path("model_repository")
    version: int | None = None
    graph: str = ""
    methods: Sequence[str] = ()
    metric: str = ""
    output: str = ""
    label: str = ""
    positive: str = "positive"
    column_of: Mapping[str, str] = field(default_factory=dict)
    format: str = ""
    num_calibration: int = 256
    num_held_out: int = 1000
    seed: int = 0
    num_rounds: int = 5
    objective: str = "latency"
    timeout_s: float = 60.0
    is_dry_run: bool = False
    log: Path | None = None


def optimize(options: OptimizeOptions, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Build candidates, judge each through the graph, and write the fastest that the gate lets through.

    The original and the versions that exist are never changed. However a run ends, the repository is as it was, or has
    one more version and a note on it.

    Args:
        options: What to do.
        tell: Called with what is done now.

    Returns:
        What was found; ``written`` is the number of the new version, if there is one.

    Raises:
        WeftError: The run cannot begin or go on: nothing was written.
        OSError: A file cannot be read or written: nothing was written.
    """
    methods = _methods(options.methods)
    if options.objective not in OBJECTIVES:
        raise InvalidArgumentError(
            f"unknown --objective '{options.objective}'{suggestion(options.objective, OBJECTIVES)}"
        )
    model = find_model(options.repository, options.model, options.version)
    uses = graphs_that_call(options.repository, options.model)
    plan = choose_graph(options.graph, model, uses)
    number = max([*model.versions, *noted_versions(model.source.config)]) + 1
    check_pinned(model, number, uses)
    if not options.is_dry_run:
        check_publishable(model.folder)
    with (
        held_model(model.folder),
        workspace() as work,
        (options.log or work / "mesh.log").open("w+") as log,
    ):
        return _run(options, methods, TrialMesh(model, plan, work, log, options.timeout_s), number, tell)


def _methods(names: Sequence[str]) -> list[OptimizationMethod]:
    for name in names:
        if name not in METHODS:
            raise InvalidArgumentError(f"unknown --method '{name}'{suggestion(name, METHODS)}")
    return [METHODS[name] for name in dict.fromkeys(names or METHODS)]


def _run(
    options: OptimizeOptions,
    methods: Sequence[OptimizationMethod],
    mesh: TrialMesh,
    number: int,
    tell: Callable[[str], None],
) -> Report:
    source = mesh.model.source
    tell(f"recording the inputs of {source.name}")
    original = mesh.repository("original", source.folder, {})
    with quiet(mesh):
        material = asyncio.run(_record(options, mesh, original))
    tell(f"answers of the original to {len(material.data.held_out)} held-out rows")
    answers = mesh.answers(original, material.data.held_out, material.metric)
    report = _report(options, mesh, material)
    with mesh.alone("original", source.folder, {}) as process:
        meter = CostMeter(process, material.requests, options.num_rounds)
        candidates = Candidates(
            mesh, material, answers, process, meter, max_loss=options.max_loss, seed=options.seed, tell=tell
        )
        report.num_held_out_rows = len(candidates.rows)
        report.num_unanswered_rows = len(material.data.held_out) - len(candidates.rows)
        for method in methods:
            report.candidates.append(candidates.try_method(method))
        measured = [one.original_costs for one in report.candidates if one.costs]
        report.costs = measured[0] if measured else meter.measure_original()
    passing = {one.method: one for one in report.candidates if one.state == "passes"}
    report.picked, report.why_none = pick(
        [
            GateCandidate(one.method, objective_ratio(one.costs, options.objective), one.size_bytes)
            for one in passing.values()
        ]
    )
    if report.picked:
        best, files = passing[report.picked], candidates.files(report.picked)
        text = config_with_note(mesh.model, number, report, best, files)
        report.advice = advice(mesh.model, number, best)
        if not options.is_dry_run:
            tell(f"writing version {number}")
            publish(mesh.model.folder, number, files, text)
            report.written = number
    return report


async def _record(options: OptimizeOptions, mesh: TrialMesh, repository: Path) -> Material:
    """The data, and the model's own inputs for the rows that calibrate."""
    async with recording_mesh(repository, mesh.model.source.name) as recorder:
        signature = recorder.signature(mesh.graph, mesh.graph_version)
        metric = make_metric(
            options.metric,
            MetricOptions(signature, options.column_of, options.output, options.label, options.positive),
        )
        layouts = [make_layout(signature, column_of=column_of) for column_of in metric.passes]
        columns = [name for layout in layouts for name in layout.columns]
        data = await asyncio.to_thread(
            read_rows,
            options.data,
            list(dict.fromkeys([*columns, *metric.columns])),
            num_calibration=options.num_calibration,
            num_held_out=options.num_held_out,
            seed=options.seed,
            format=options.format,
        )
        requests: dict[int, Sequence[Inputs]] = {}
        for num_rows in sorted({1, min(signature.max_batch_size or 1, _COST_ROWS, len(data.calibration))}):
            requests[num_rows] = await recorder.record(
                mesh.graph, mesh.graph_version, data.calibration, metric.passes[0], rows_per_request=num_rows
            )
    return Material(metric, data, requests)


def _report(options: OptimizeOptions, mesh: TrialMesh, material: Material) -> Report:
    """What is known before the first candidate."""
    return Report(
        model=mesh.model.source.name,
        version=mesh.model.version,
        graph="" if mesh.plan is None else f"{mesh.graph}/{mesh.graph_version}",
        metric=material.metric.name,
        meaning=material.metric.meaning,
        max_loss=options.max_loss,
        objective=options.objective,
        data=options.data,
        data_sha256=material.data.sha256,
        num_calibration_rows=len(material.data.calibration),
        num_held_out_rows=0,
        num_unanswered_rows=0,
        seed=options.seed,
        size_bytes=sum(file.stat().st_size for file in model_files(mesh.model.source)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        software=dict(_software()),
    )


def _software() -> Iterator[tuple[str, str]]:
    for package in _SOFTWARE:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
