"""Where versions of a model are tried: meshes and processes over repositories of links, in a temporary folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weft.base.errors import UnavailableError
from weft.language import GraphPlan
from weft.optimize.answers import RowAnswers
from weft.optimize.evaluation import evaluate
from weft.optimize.metrics.metric import AnswerMetric
from weft.optimize.model_process import VersionProcess
from weft.optimize.repository.source import RepositoryModel
from weft.optimize.repository.staging import alone, stage_version, staged_config
from weft.optimize.rows import DataRows


@dataclass(frozen=True)
class TrialMesh:
    """Serves versions of a model, each by its files and the parameters that it needs beside those of the model.

    Attributes:
        model: The original.
        plan: The graph that rows go through; None: straight to the model.
        folder: For what is staged.
        log: Gets what the services log.
        timeout_s: Of a request.
    """

    model: RepositoryModel
    plan: GraphPlan | None
    folder: Path
    log: IO[str]
    timeout_s: float

    @property
    def graph(self) -> str:
        """Name of the graph, or of the model."""
        return self.model.source.name if self.plan is None else self.plan.signature.name

    @property
    def graph_version(self) -> str:
        """Of the graph; "" of the model, which has the one version."""
        return "" if self.plan is None else self.plan.signature.version

    def repository(self, name: str, files: Path, parameters: Mapping[str, str]) -> Path:
        """A repository with the version and all that the graph needs. Raises OSError."""
        config = staged_config(self.model, parameters)
        return stage_version(self.folder / name, self.model, files, config, plan=self.plan)

    def answers(self, repository: Path, rows: DataRows, metric: AnswerMetric) -> list[RowAnswers]:
        """Answers to rows from a mesh over a repository, for each pass of the metric. Raises as ``evaluate``."""
        return evaluate(
            repository,
            self.graph,
            self.graph_version,
            rows,
            metric.passes,
            metric.outputs,
            log=self.log,
            timeout_s=self.timeout_s,
        )

    def alone(self, name: str, files: Path, parameters: Mapping[str, str]) -> VersionProcess:
        """The version in a process of its own.

        Raises:
            UnavailableError: It cannot be loaded.
            OSError: It cannot be staged.
        """
        model = self.model
        config = alone(staged_config(model, parameters))
        repository = stage_version(self.folder / f"{name}-alone", model, files, config, plan=None)
        has_batch = model.source.config.max_batch_size > 0
        try:
            return VersionProcess(repository, model.service, model.source.name, has_batch=has_batch)
        except UnavailableError as error:
            raise UnavailableError(f"it cannot be loaded: {error.message}") from error
