"""Candidates: built by methods, tried, and judged; what goes wrong with one concerns no other."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.base.errors import InvalidArgumentError, WeftError
from weft.optimize.answers import RowAnswers, answered_rows, num_not_finite
from weft.optimize.bootstrap import loss_of
from weft.optimize.cost import CostMeter
from weft.optimize.gate import refusal
from weft.optimize.methods.method import Inputs, OptimizationMethod, SourceModel
from weft.optimize.metrics.metric import AnswerMetric
from weft.optimize.model_process import VersionProcess
from weft.optimize.report import CandidateReport
from weft.optimize.repository.provenance import needed_parameters
from weft.optimize.repository.source import model_files
from weft.optimize.rows import SplitData
from weft.optimize.trial_mesh import TrialMesh


class Material(NamedTuple):
    """What is known before the first candidate is built.

    Attributes:
        metric: Compares answers.
        data: The user's.
        requests: The model's own inputs for the rows that calibrate, by rows of a request to the graph.
    """

    metric: AnswerMetric
    data: SplitData
    requests: Mapping[int, Sequence[Inputs]]


class Candidates:
    """Builds and judges candidates of one model.

    Args:
        mesh: Where they are tried.
        material: For all of them.
        answers: Of the original to the held-out rows, for each pass of the metric.
        original: Runs as long as candidates are tried.
        meter: Compares their cost with the original's.
        max_loss: Limit of the loss.
        seed: Of the interval.
        tell: Called with what is done now.

    Attributes:
        rows: Held-out rows that the original answers, ascending; only these are judged.
    """

    def __init__(
        self,
        mesh: TrialMesh,
        material: Material,
        answers: Sequence[RowAnswers],
        original: VersionProcess,
        meter: CostMeter,
        *,
        max_loss: float,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self._mesh = mesh
        self._material = material
        self.rows = answered_rows(answers)
        if not len(self.rows):
            first = answers[0].failed[0]
            raise InvalidArgumentError(
                f"'{mesh.graph}' answers none of the held-out rows; the first: {first.status}: {first.message}"
            )
        self._answers = answers
        self._original = original
        self._meter = meter
        self._max_loss = max_loss
        self._seed = seed
        self._tell = tell
        self._source = self._copied()

    def try_method(self, method: OptimizationMethod) -> CandidateReport:
        """Build a candidate and judge it. ``files`` has those of one that passes, others are removed."""
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

    def files(self, name: str) -> Path:
        """Folder of a candidate's files."""
        return self._mesh.folder / f"{name}-files"

    def _build(self, found: CandidateReport, method: OptimizationMethod, folder: Path) -> bool:
        """Whether there is a candidate."""
        self._tell(f"{method.name}: building")
        with quiet(self._mesh):
            found.reason = method.unsuitable(self._source)
            if found.reason:
                found.state = "unsuitable"
                return False
            built = method.build(self._source, self._material.requests[1], folder)
        found.notes = built.notes
        found.size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.parameters = needed_parameters(self._source.config, built.parameters)
        self._add_companions(folder)
        return True

    def _try(self, found: CandidateReport, name: str, folder: Path) -> None:
        with self._mesh.alone(name, folder, found.parameters) as process:
            if process.signature != self._original.signature:
                raise InvalidArgumentError(
                    f"its inputs and outputs are {process.signature}, those of the original {self._original.signature}"
                )
            self._tell(f"{name}: answers to {len(self.rows)} held-out rows")
            repository = self._mesh.repository(name, folder, found.parameters)
            held_out = self._material.data.held_out
            self._judge(found, self._mesh.answers(repository, held_out, self._material.metric))
            self._tell(f"{name}: cost")
            found.original_costs, found.costs = self._meter.measure(process)

    def _judge(self, found: CandidateReport, answers: Sequence[RowAnswers]) -> None:
        own = answered_rows(answers)
        lost = np.setdiff1d(self.rows, own)
        found.num_failed_rows = len(lost)
        if len(common := np.intersect1d(self.rows, own)):
            self._compare(found, [one.only(common) for one in answers], common.tolist())
        if len(lost):
            first = next(failed for one in answers for failed in one.failed if failed.row in lost)
            found.reason = (
                f"{len(lost)} of {len(self.rows)} rows fail that the original answers; the first: {first.status}: "
                f"{first.message}"
            )
        if found.reason:
            found.state = "refused"

    def _compare(self, found: CandidateReport, answers: Sequence[RowAnswers], rows: list[int]) -> None:
        original = [one.only(np.array(rows)) for one in self._answers]
        num_broken = num_not_finite(original, answers)
        scores = self._material.metric.scores(original, answers, self._material.data.held_out.take(rows))
        num_broken = num_broken or int((~np.isfinite(scores.candidate)).sum())
        if num_broken:
            found.reason = f"its answers to {num_broken} of {len(rows)} rows are not finite numbers"
            return
        found.loss = loss_of(scores, self._seed)
        found.reason = refusal(found.loss, self._max_loss)

    def _copied(self) -> SourceModel:
        """A copy for the methods, since some libraries write beside what they read."""
        source = self._mesh.model.source
        folder = self._mesh.folder / "source" / source.folder.name
        shutil.copytree(source.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return source._replace(folder=folder, file=folder / source.file.relative_to(source.folder))

    def _add_companions(self, folder: Path) -> None:
        """Copy what the original's folder has beside its weights: labels, for example."""
        weights = set(model_files(self._source))
        for entry in self._source.folder.iterdir():
            target = folder / entry.name
            if entry in weights or target.exists():
                continue
            if entry.is_dir():
                shutil.copytree(entry, target)
            else:
                shutil.copy2(entry, target)


@contextlib.contextmanager
def quiet(mesh: TrialMesh) -> Iterator[None]:
    """What libraries print goes into the log."""
    with contextlib.redirect_stdout(mesh.log), contextlib.redirect_stderr(mesh.log):
        yield
