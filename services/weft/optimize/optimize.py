"""``optimize``: makes a model smaller and faster, behind an accuracy gate."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.text.suggestion import suggestion
from weft.jobs.atomic_files import locked
from weft.jobs.layout import make_layout
from weft.optimize.cost import OBJECTIVES, CostMeter, VersionProcess, objective_ratio
from weft.optimize.gate import GateCandidate, loss_of, pick, refusal
from weft.optimize.methods import METHODS
from weft.optimize.methods.method import Inputs, OptimizationMethod
from weft.optimize.metrics import AnswerMetric, MetricOptions, make_metric
from weft.optimize.publishing import (
    advice,
    check_publishable,
    config_with_note,
    held_model,
    needed_parameters,
    noted_versions,
    publish,
)
from weft.optimize.report import CandidateReport, Report
from weft.optimize.rows import RowAnswers, SplitData, answered_rows, num_not_finite, read_rows
from weft.optimize.source import check_pinned, choose_graph, find_model, graphs_that_call, model_files
from weft.optimize.trial_mesh import RecordingMesh, TrialMesh

#: Rows of the larger of the two requests whose cost is measured.
_COST_ROWS = 32
_SOFTWARE = ("weft", "onnx", "onnxruntime", "onnxruntime-gpu", "torch")
_PREFIX = "weft-optimize-"
#: A younger folder without a lock may be one whose run has yet to lock it, in seconds.
_MIN_AGE_S = 60.0


@dataclass(frozen=True)
class OptimizeOptions:
    """Options of an optimisation.

    Attributes:
        data: Path or pattern of the user's data.
        max_loss: Limit for the upper end of the loss's interval, as a share.
        version: Of the model; None: the highest that is served.
        graph: The graph that the data goes through, NAME or NAME/VERSION; "": the only one that calls the model, or
            straight to the model if none does; the model's own name: straight to the model.
        methods: Names; none: all.
        metric: Name, or ``FILE.py:function``; "": one that suits the graph.
        output: Judged output of the graph; "": the only one that the metric can judge.
        label: Column with the right answers; "": none.
        positive: Column with the texts to find; for the metric ``retrieval``.
        column_of: Column of an input, if named differently.
        format: Of the data; "": by suffix.
        num_calibration, num_held_out: Most rows.
        seed: Of the split and the interval.
        num_rounds: Rounds in which each cost is measured, a candidate and the original in turn.
        objective: What must improve: ``latency``, the time of a one-row request, or ``throughput``, rows a second in
            requests of 32 rows, or of as many as the graph takes.
        log: Receives the services' logs; None: dropped.
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
    """Build candidates, judge each through the graph, and write the fastest that passes the gate.

    The original and the existing versions are never changed. However a run ends, the repository is unchanged, or has
    one more version and a note on it, whose number is the report's ``written``. ``tell`` is called with progress
    messages.

    Raises:
        WeftError: The run cannot begin or go on: nothing was written.
        OSError: A file cannot be read or written: nothing was written.
    """
    for name in options.methods:
        if name not in METHODS:
            raise InvalidArgumentError(f"unknown --method '{name}'{suggestion(name, METHODS)}")
    methods = [METHODS[name] for name in dict.fromkeys(options.methods or METHODS)]
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
    with mesh.quiet():
        trial_data = asyncio.run(_record(options, mesh, original))
    tell(f"answers of the original to {len(trial_data.data.held_out)} held-out rows")
    answers = mesh.answers(original, trial_data.data.held_out, trial_data.metric)
    report = Report(
        model=source.name,
        version=mesh.model.version,
        graph="" if mesh.plan is None else f"{mesh.graph}/{mesh.graph_version}",
        metric=trial_data.metric.name,
        meaning=trial_data.metric.meaning,
        max_loss=options.max_loss,
        objective=options.objective,
        data=options.data,
        data_sha256=trial_data.data.sha256,
        num_calibration_rows=len(trial_data.data.calibration),
        num_held_out_rows=0,
        num_unanswered_rows=0,
        seed=options.seed,
        size_bytes=sum(file.stat().st_size for file in model_files(source)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        software=dict(_software()),
    )
    with mesh.alone("original", source.folder, {}) as process:
        meter = CostMeter(process, trial_data.requests, options.num_rounds)
        candidates = _Candidates(options, mesh, trial_data, answers, process, meter, tell)
        report.num_held_out_rows = len(candidates.rows)
        report.num_unanswered_rows = len(trial_data.data.held_out) - len(candidates.rows)
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


def _software() -> Iterator[tuple[str, str]]:
    for package in _SOFTWARE:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


class _TrialData(NamedTuple):
    """Everything prepared before the first candidate is built.

    Attributes:
        requests: The model's own inputs for the calibration rows, by rows of a request to the graph.
    """

    metric: AnswerMetric
    data: SplitData
    requests: Mapping[int, Sequence[Inputs]]


async def _record(options: OptimizeOptions, mesh: TrialMesh, repository: Path) -> _TrialData:
    async with RecordingMesh(repository, mesh.model.source.name) as recorder:
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
    return _TrialData(metric, data, requests)


@dataclass
class _Candidates:
    """Builds, runs and evaluates candidates of one model; errors of one do not affect others.

    Attributes:
        answers: The original's answers to the held-out rows, for each pass of the metric.
        original: Runs as long as candidates are tried.
        rows: Held-out rows that the original answers, ascending; only these are evaluated.
    """

    options: OptimizeOptions
    mesh: TrialMesh
    trial_data: _TrialData
    answers: Sequence[RowAnswers]
    original: VersionProcess
    meter: CostMeter
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.rows = answered_rows(self.answers)
        if not len(self.rows):
            first = self.answers[0].failed[0]
            raise InvalidArgumentError(
                f"'{self.mesh.graph}' answers none of the held-out rows; the first: {first.status}: {first.message}"
            )
        source = self.mesh.model.source
        folder = self.mesh.folder / "source" / source.folder.name
        # A copy for the methods, since some libraries write beside what they read.
        shutil.copytree(source.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        self._source = source._replace(folder=folder, file=folder / source.file.relative_to(source.folder))

    def files(self, name: str) -> Path:
        """Folder of a candidate's files."""
        return self.mesh.folder / f"{name}-files"

    def try_method(self, method: OptimizationMethod) -> CandidateReport:
        """Build and evaluate a candidate. ``files`` keeps its files if it passes; otherwise they are removed."""
        found = CandidateReport(method.name)
        folder = self.files(method.name)
        folder.mkdir()
        try:
            if self._build(found, method, folder):
                self._try(found, method.name, folder)
        except (WeftError, OSError) as error:
            found.state, found.reason = "failed", str(error)
        except Exception as error:
            found.state, found.reason = "failed", f"{type(error).__name__}: {error}"
        if found.state != "passes":
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _build(self, found: CandidateReport, method: OptimizationMethod, folder: Path) -> bool:
        """Build the candidate; False if the method gives none."""
        self.tell(f"{method.name}: building")
        with self.mesh.quiet():
            found.reason = method.unsuitable(self._source)
            if found.reason:
                found.state = "unsuitable"
                return False
            built = method.build(self._source, self.trial_data.requests[1], folder)
        found.notes = built.notes
        found.size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.parameters = needed_parameters(self._source.config, built.parameters)
        weights = set(model_files(self._source))
        for entry in self._source.folder.iterdir():  # what stands beside the weights: labels, for example
            target = folder / entry.name
            if entry not in weights and not target.exists():
                (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, target)
        return True

    def _try(self, found: CandidateReport, name: str, folder: Path) -> None:
        with self.mesh.alone(name, folder, found.parameters) as process:
            if process.signature != self.original.signature:
                raise InvalidArgumentError(
                    f"its inputs and outputs are {process.signature}, those of the original {self.original.signature}"
                )
            self.tell(f"{name}: answers to {len(self.rows)} held-out rows")
            repository = self.mesh.repository(name, folder, found.parameters)
            self._judge(found, self.mesh.answers(repository, self.trial_data.data.held_out, self.trial_data.metric))
            self.tell(f"{name}: cost")
            found.original_costs, found.costs = self.meter.measure(process)

    def _judge(self, found: CandidateReport, answers: Sequence[RowAnswers]) -> None:
        own = answered_rows(answers)
        lost = np.setdiff1d(self.rows, own)
        found.num_failed_rows = len(lost)
        if len(common := np.intersect1d(self.rows, own)):
            original = [one.only(common) for one in self.answers]
            answered = [one.only(common) for one in answers]
            num_broken = num_not_finite(original, answered)
            rows = self.trial_data.data.held_out.take(common.tolist())
            scores = self.trial_data.metric.scores(original, answered, rows)
            num_broken = num_broken or int((~np.isfinite(scores.candidate)).sum())
            if num_broken:
                found.reason = f"its answers to {num_broken} of {len(common)} rows are not finite numbers"
            else:
                found.loss = loss_of(scores, self.options.seed)
                found.reason = refusal(found.loss, self.options.max_loss)
        if len(lost):
            first = next(failed for one in answers for failed in one.failed if failed.row in lost)
            found.reason = (
                f"{len(lost)} of {len(self.rows)} rows fail that the original answers; the first: {first.status}: "
                f"{first.message}"
            )
        if found.reason:
            found.state = "refused"


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder for a block; its lock shows others that the run is alive. Raises OSError."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):  # of runs that were killed
        with contextlib.suppress(OSError):  # held, another user's, or gone meanwhile
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _MIN_AGE_S:
                with locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, locked(Path(name)):
        yield Path(name)
