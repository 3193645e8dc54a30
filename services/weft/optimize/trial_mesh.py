"""Where versions of a model are tried: meshes and processes over repositories of links, in a temporary folder."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weft.base.errors import DeadlineExceededError, UnavailableError
from weft.base.tensors import Array
from weft.jobs.columns import InputValues
from weft.jobs.layout import Layout, make_layout
from weft.jobs.target import JobTarget, RowsFailed
from weft.language import GraphPlan
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.optimize.answers import RowAnswers, answer_rows
from weft.optimize.metrics.metric import AnswerMetric
from weft.optimize.model_process import VersionProcess
from weft.optimize.repository.source import RepositoryModel
from weft.optimize.repository.staging import alone, stage_version, staged_config
from weft.optimize.rows import DataRows
from weft.v2.client.v2_client import V2Client

#: Rows of one request, at most, and requests at once: a full batch waits for the next one, and no longer.
_MAX_ROWS_PER_REQUEST = 32
_NUM_INFLIGHT = 2


def evaluate(
    repository: Path,
    graph: str,
    version: str,
    rows: DataRows,
    columns: Sequence[Mapping[str, str]],
    outputs: Sequence[str],
    *,
    log: IO[str],
    timeout_s: float,
) -> list[RowAnswers]:
    """Start a mesh over a repository, send the rows, and end it.

    Args:
        repository: Staged.
        graph: Graph or model.
        version: Of it; "": the highest.
        rows: Held out.
        columns: For each pass over the rows: the column of an input, where it has another name.
        outputs: Those to ask for; none: all.
        log: Gets the log of the services.
        timeout_s: Of one request.

    Returns:
        The answers of each pass.

    Raises:
        UnavailableError: The mesh does not come up, or does not answer.
        WeftError: The graph cannot be called so.
    """
    start = log.tell()
    try:
        with running_mesh(repository, log=log) as endpoints:
            return asyncio.run(_ask(endpoints["router"].grpc, graph, version, rows, columns, outputs, timeout_s))
    except MeshError as error:
        raise UnavailableError(f"the mesh cannot serve it: {last_error(Path(log.name), start)}") from error


async def _ask(
    url: str,
    graph: str,
    version: str,
    rows: DataRows,
    columns: Sequence[Mapping[str, str]],
    outputs: Sequence[str],
    timeout_s: float,
) -> list[RowAnswers]:
    places = asyncio.Semaphore(_NUM_INFLIGHT)
    async with V2Client(url) as client:
        target = JobTarget(
            client, graph, version, outputs=outputs, timeout_s=timeout_s, patience_s=timeout_s, clock_s=time.monotonic
        )
        signature = (await target.identify()).signature
        answers = []
        for column_of in columns:
            layout = make_layout(
                signature,
                column_of=column_of,
                outputs=outputs,
                binary=[spec.name for spec in signature.outputs if spec.datatype == "BYTES"],
                rows_per_request=min(signature.max_batch_size, _MAX_ROWS_PER_REQUEST),
            )

            async def send(
                inputs: Mapping[str, InputValues],
                indices: Sequence[int],
                on_busy: Callable[[], None],
                layout: Layout = layout,
            ) -> dict[str, Array]:
                async with places:
                    try:
                        return await target.infer(layout.tensors(inputs, indices), on_busy)
                    except RowsFailed as failure:
                        if failure.error.code != DeadlineExceededError.code:
                            raise
                        raise UnavailableError(  # of its rows none is at fault: halves of the request may wait as long
                            f"a request of {len(indices)} rows takes longer than {timeout_s:g} s, also when tried "
                            "again; --timeout-ms allows more"
                        ) from failure

            answers.append(await answer_rows(rows, layout, send))
    return answers


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
