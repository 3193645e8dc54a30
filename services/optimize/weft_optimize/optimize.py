"""A model made smaller and faster behind an accuracy gate: ``optimize``."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from weft_common.errors import InvalidArgumentError, UnavailableError, WeftError
from weft_common.text.suggestion import suggestion
from weft_jobs.layout import make_layout
from weft_optimize.answers import RowAnswers, num_not_finite
from weft_optimize.bootstrap import loss_of
from weft_optimize.cost import CostMeter, overall
from weft_optimize.evaluation import evaluate
from weft_optimize.gate import GateCandidate, caution, pick, refusal
from weft_optimize.methods import METHODS
from weft_optimize.methods.method import Inputs, OptimizationMethod, SourceModel
from weft_optimize.metrics import make_metric
from weft_optimize.metrics.metric import AnswerMetric, MetricOptions
from weft_optimize.model_process import VersionProcess
from weft_optimize.recording import recording_mesh
from weft_optimize.report import CandidateReport, Report
from weft_optimize.repository.provenance import needed_parameters, noted_versions, with_provenance
from weft_optimize.repository.publishing import held_model, publish
from weft_optimize.repository.source import (
    GraphUse,
    RepositoryModel,
    find_model,
    graphs_that_call,
    model_files,
    sha256_of,
)
from weft_optimize.repository.staging import alone, stage, staged_config
from weft_optimize.rows import SplitData, read_rows
from weft_router.graph import GraphPlan
from weft_tools.compiled import load_plan

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
    timeout_s: float = 60.0
    is_dry_run: bool = False
    log: Path | None = None


class _Material(NamedTuple):
    """What is known before the first candidate is built."""

    metric: AnswerMetric
    data: SplitData
    requests: Mapping[int, Sequence[Inputs]]


def optimize(options: OptimizeOptions, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Build candidates, judge each through the graph, and write the cheapest that the gate lets through.

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
    model = find_model(options.repository, options.model, options.version)
    uses = graphs_that_call(options.repository, options.model)
    graph, plan = _graph(options, model, uses)
    number = max([*model.versions, *noted_versions(model.source.config)]) + 1
    _check_pinned(model, number, uses)
    with held_model(model.folder), tempfile.TemporaryDirectory(prefix="weft-optimize-") as work, _log(options) as log:
        return _Run(options, methods, model, graph, plan, number, Path(work), log, tell).run()


def _methods(names: Sequence[str]) -> list[OptimizationMethod]:
    for name in names:
        if name not in METHODS:
            raise InvalidArgumentError(f"unknown --method '{name}'{suggestion(name, METHODS)}")
    return [METHODS[name] for name in dict.fromkeys(names or METHODS)]


def _graph(options: OptimizeOptions, model: RepositoryModel, uses: Sequence[GraphUse]) -> tuple[str, GraphPlan | None]:
    """The graph that the data goes through, as ``--graph`` names it, and its plan; "", None: straight to the model."""
    names = [use.name for use in uses]
    chosen = options.graph
    if chosen == model.source.name:
        return "", None
    if not chosen:
        if not names:
            return "", None
        if len(names) > 1:
            raise InvalidArgumentError(
                f"the graphs {', '.join(names)} call '{model.source.name}'; --graph names the one that the data is "
                f"for, or --graph {model.source.name} for data that goes straight to the model"
            )
        chosen = names[0]
    plan = load_plan(chosen, options.repository)
    if plan.signature.name not in names:
        raise InvalidArgumentError(
            f"graph '{chosen}' does not call '{model.source.name}'; {', '.join(names) or 'no graph'} does"
        )
    return chosen, plan


def _check_pinned(model: RepositoryModel, number: int, uses: Sequence[GraphUse]) -> None:
    """Refuse to take a version away from a graph that asks for it."""
    gone = {*model.serves(model.versions)} - {*model.serves([*model.versions, number])}
    for use in uses:
        if asked := sorted(use.versions & gone):
            raise InvalidArgumentError(
                f"graph '{use.name}' asks for version {asked[0]} of '{model.source.name}', which would no longer be "
                f"served beside a version {number}; put version_policy {{ all {{ }} }} into its config.pbtxt first"
            )


@contextlib.contextmanager
def _log(options: OptimizeOptions) -> Iterator[IO[str]]:
    if options.log is not None:
        with options.log.open("w+") as log:
            yield log
    else:
        with tempfile.NamedTemporaryFile("w+", prefix="weft-optimize-", suffix=".log") as log:
            yield log


class _Run:
    def __init__(
        self,
        options: OptimizeOptions,
        methods: Sequence[OptimizationMethod],
        model: RepositoryModel,
        graph: str,
        plan: GraphPlan | None,
        number: int,
        work: Path,
        log: IO[str],
        tell: Callable[[str], None],
    ) -> None:
        self._options = options
        self._methods = methods
        self._model = model
        self._name, _, self._graph_version = (graph or model.source.name).partition("/")
        self._graph = graph
        self._plan = plan
        self._number = number
        self._work = work
        self._log = log
        self._tell = tell
        self._folders: dict[str, Path] = {}

    def run(self) -> Report:
        options, model = self._options, self._model
        self._tell(f"recording the inputs of {model.source.name}")
        original = self._stage("original", model.source.folder, {})
        self._copy = self._copied()
        with self._quiet():
            material = asyncio.run(self._record(original))
        data = material.data
        self._tell(f"answers of the original to {len(data.held_out)} held-out rows")
        answers, rows = self._complete(self._evaluate(original, material))
        report = Report(
            model=model.source.name,
            version=model.version,
            graph=self._graph,
            metric=material.metric.name,
            meaning=material.metric.meaning,
            max_loss=options.max_loss,
            data=options.data,
            data_sha256=data.sha256,
            num_calibration_rows=len(data.calibration),
            num_held_out_rows=len(rows),
            num_unanswered_rows=len(data.held_out) - len(rows),
            seed=options.seed,
            size_bytes=sum(file.stat().st_size for file in model_files(model.source)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            software=dict(_software()),
        )
        with self._process("original", model.source.folder, {}) as process:
            meter = CostMeter(process, material.requests, options.num_rounds)
            for method in self._methods:
                report.candidates.append(self._try(method, material, answers, rows, process, meter))
            measured = [one.original_costs for one in report.candidates if one.costs]
            report.costs = measured[0] if measured else meter.measure_original()
        self._pick(report)
        return report

    async def _record(self, repository: Path) -> _Material:
        """The data, and the model's own inputs for the rows that calibrate."""
        options = self._options
        async with recording_mesh(repository, self._model.source.name) as mesh:
            signature = mesh.signature(self._name, self._graph_version)
            metric = make_metric(
                options.metric,
                MetricOptions(signature, options.column_of, options.output, options.label, options.positive),
            )
            layouts = [make_layout(signature, column_of=column_of) for column_of in metric.passes]
            columns = dict.fromkeys(name for layout in layouts for name in layout.columns)
            data = read_rows(
                options.data,
                list(dict.fromkeys([*columns, *metric.columns])),
                num_calibration=options.num_calibration,
                num_held_out=options.num_held_out,
                seed=options.seed,
                format=options.format,
            )
            requests: dict[int, Sequence[Inputs]] = {}
            for num_rows in sorted({1, min(signature.max_batch_size or 1, _COST_ROWS, len(data.calibration))}):
                requests[num_rows] = await mesh.record(
                    self._name, self._graph_version, data.calibration, metric.passes[0], rows_per_request=num_rows
                )
        return _Material(metric, data, requests)

    def _try(
        self,
        method: OptimizationMethod,
        material: _Material,
        original: Sequence[RowAnswers],
        rows: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        process: VersionProcess,
        meter: CostMeter,
    ) -> CandidateReport:
        """Build a candidate and judge it; nothing that goes wrong with it concerns the others."""
        found = CandidateReport(method.name)
        self._tell(f"{method.name}: building")
        folder = self._work / f"{method.name}-files"
        folder.mkdir()
        try:
            with self._quiet():
                found.reason = method.unsuitable(self._copy)
                if found.reason:
                    found.state = "unsuitable"
                    return found
                built = method.build(self._copy, material.requests[1], folder)
            found.notes = built.notes
            found.size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.parameters = needed_parameters(self._model.source.config, built.parameters)
            self._take_over(folder)
            with self._process(method.name, folder, found.parameters) as candidate:
                if candidate.signature != process.signature:
                    raise InvalidArgumentError(_difference(process.signature, candidate.signature))
                self._tell(f"{method.name}: answers to {len(rows)} held-out rows")
                repository = self._stage(method.name, folder, found.parameters)
                self._judge(found, material, original, rows, self._evaluate(repository, material))
                self._tell(f"{method.name}: cost")
                found.original_costs, found.costs = meter.measure(candidate)
                found.cost_ratio = overall(found.costs)
        except (WeftError, OSError) as error:
            found.state, found.reason = "failed", str(error)
        except Exception as error:
            found.state, found.reason = "failed", f"{type(error).__name__}: {error}"
        if found.state == "passes":
            self._folders[method.name] = folder
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _judge(
        self,
        found: CandidateReport,
        material: _Material,
        original: Sequence[RowAnswers],
        rows: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        answers: Sequence[RowAnswers],
    ) -> None:
        own = _answered(answers)
        lost = np.setdiff1d(rows, own)
        found.num_failed_rows = len(lost)
        common = np.intersect1d(rows, own)
        if len(common):
            before, after = ([one.only(common) for one in some] for some in (original, answers))
            num_broken = num_not_finite(before, after)
            scores = material.metric.scores(before, after, material.data.held_out.take(common.tolist()))
            if not num_broken and np.isfinite(scores.candidate).all():
                found.loss = loss_of(scores, self._options.seed)
                found.reason = refusal(found.loss, self._options.max_loss)
                found.caution = caution(found.loss, self._options.max_loss)
            else:
                num_broken = num_broken or int((~np.isfinite(scores.candidate)).sum())
                found.reason = f"its answers to {num_broken} of {len(common)} rows are not finite numbers"
        if len(lost):
            first = next(failed for one in answers for failed in one.failed if failed.row in lost)
            found.reason = (
                f"{len(lost)} of {len(rows)} rows fail that the original answers; the first: {first.status}: "
                f"{first.message}"
            )
        if found.reason:
            found.state = "refused"

    def _complete(
        self, answers: Sequence[RowAnswers]
    ) -> tuple[Sequence[RowAnswers], "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
        """The original's answers to the rows that it answers in every pass, and these rows."""
        rows = _answered(answers)
        if not len(rows):
            first = answers[0].failed[0]
            raise InvalidArgumentError(
                f"'{self._name}' answers none of the held-out rows; the first: {first.status}: {first.message}"
            )
        return [one.only(rows) for one in answers], rows

    def _pick(self, report: Report) -> None:
        passing = [one for one in report.candidates if one.state == "passes"]
        report.picked, report.why_none = pick([GateCandidate(c.method, c.cost_ratio, c.size_bytes) for c in passing])
        if not report.picked:
            return
        best = next(one for one in passing if one.method == report.picked)
        model = self._model
        files = self._folders[best.method]
        text = with_provenance(
            model.text,
            self._number,
            f"from version {model.version} by {best.method}, {report.created[:10]}; weft optimize wrote this note.",
            self._facts(report, best, files),
            best.parameters,
        )
        report.advice = self._advice(best)
        if self._options.is_dry_run:
            return
        self._tell(f"writing version {self._number}")
        publish(model.folder, self._number, files, text)
        report.written = self._number

    def _facts(self, report: Report, best: CandidateReport, files: Path) -> dict[str, object]:
        """What the note on the new version says."""
        loss = best.loss
        return {
            "method": best.method,
            "notes": best.notes,
            "source_version": report.version,
            "source_sha256": sha256_of(self._model.source.file),
            "sha256": sha256_of(files / self._model.source.file.name),
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
            "cpu_time_ratio": {str(rows): round(cost.ratio, 3) for rows, cost in best.costs.items()},
            "created": report.created,
            "software": dict(report.software),
        }

    def _advice(self, best: CandidateReport) -> list[str]:
        model, number = self._model, self._number
        before, after = model.serves(model.versions), model.serves([*model.versions, number])
        if number not in after:
            first = f"version_policy does not name version {number}: it is not served until you add it."
        elif gone := [version for version in before if version not in after]:
            first = (
                f"By version_policy, version {number} is served in place of version {', '.join(map(str, gone))}. "
                "version_policy { all { } } keeps both."
            )
        else:
            first = (
                f"Version {number} answers requests that name no version; {', '.join(map(str, before))} stay served."
            )
        advice = [
            first,
            "A mesh with --model-control-mode poll takes it over by itself; any other does after `weft restart`. "
            f"Remove the folder {model.folder / str(number)} to go back.",
        ]
        if best.parameters:
            names = ", ".join(f"{key} = {value}" for key, value in best.parameters.items())
            advice.append(f"config.pbtxt gets {names}, which holds for all versions of the model.")
        return advice

    def _evaluate(self, repository: Path, material: _Material) -> list[RowAnswers]:
        metric = material.metric
        return evaluate(
            repository,
            self._name,
            self._graph_version,
            material.data.held_out,
            metric.passes,
            metric.outputs,
            log=self._log,
            timeout_s=self._options.timeout_s,
        )

    def _stage(self, name: str, files: Path, parameters: Mapping[str, str]) -> Path:
        return stage(self._work / name, self._model, files, staged_config(self._model, parameters), plan=self._plan)

    def _process(self, name: str, files: Path, parameters: Mapping[str, str]) -> VersionProcess:
        model = self._model
        config = alone(staged_config(model, parameters))
        repository = stage(self._work / f"{name}-alone", model, files, config, plan=None)
        try:
            return VersionProcess(
                repository, model.service, model.source.name, has_batch=model.source.config.max_batch_size > 0
            )
        except UnavailableError as error:
            raise UnavailableError(f"it cannot be loaded: {error.message}") from error

    def _copied(self) -> SourceModel:
        """A copy for the methods, since some libraries write beside what they read."""
        source = self._model.source
        folder = self._work / "source" / source.folder.name
        shutil.copytree(source.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return source._replace(folder=folder, file=folder / source.file.relative_to(source.folder))

    def _take_over(self, folder: Path) -> None:
        """Copy what the original's folder has beside its weights: labels, for example."""
        weights = set(model_files(self._model.source))
        for entry in self._model.source.folder.iterdir():
            target = folder / entry.name
            if entry in weights or target.exists() or entry.name == "__pycache__":
                continue
            if entry.is_dir():
                shutil.copytree(entry, target)
            else:
                shutil.copy2(entry, target)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """What libraries print goes into the log."""
        with contextlib.redirect_stdout(self._log), contextlib.redirect_stderr(self._log):
            yield


def _answered(answers: Sequence[RowAnswers]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Rows that have an answer in every pass, ascending."""
    rows = answers[0].rows
    for one in answers[1:]:
        rows = np.intersect1d(rows, one.rows)
    return rows


def _difference(original: object, candidate: object) -> str:
    return f"its signature is another: {candidate}, the original's is {original}"


def _software() -> Iterator[tuple[str, str]]:
    for package in _SOFTWARE:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
