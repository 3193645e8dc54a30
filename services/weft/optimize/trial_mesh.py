"""Runs versions of a model in meshes and processes over staged repositories, in a temporary folder.

One of these meshes is in this process: it records the model's own inputs while rows go through the graph.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, InvalidArgumentError, RemoteError, UnavailableError, WeftError
from weft.base.repository.layout import folders_of_models
from weft.base.signature import ModelSignature
from weft.base.tensors import Array, WireTensor, decode
from weft.jobs.layout import make_layout
from weft.jobs.target import JobTarget, RowsFailed
from weft.language import GraphPlan
from weft.mesh.fused import FusedCore
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.optimize.cost import VersionProcess
from weft.optimize.methods.method import Inputs
from weft.optimize.metrics import AnswerMetric
from weft.optimize.rows import DataRows, RowAnswers, answer_rows
from weft.optimize.source import RepositoryModel, alone, stage_version, staged_config
from weft.serving.calls import Callee
from weft.serving.core import ServingCore
from weft.tools.offline import BACKENDS, GRAPH_FOLDER
from weft.v2.client.v2_client import V2Client

#: Rows of one request, at most, and requests at once: a full batch waits for the next one, and no longer.
_MAX_ROWS_PER_REQUEST = 32
_NUM_INFLIGHT = 2
#: Requests at once while inputs are recorded.
_NUM_RECORDED_AT_ONCE = 8
_GRACE_S = 20.0

#: Number of the request to the graph that is answered.
_request: ContextVar[int] = ContextVar("request", default=0)


@dataclass(frozen=True)
class TrialMesh:
    """Serves versions of a model, each given by its files and additional parameters.

    Attributes:
        model: The original.
        plan: The graph that rows go through; None: straight to the model.
        log: Receives the services' logs.
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
        """Version of the graph; "" if the rows go to the model."""
        return "" if self.plan is None else self.plan.signature.version

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Redirect what libraries print within the block to the log."""
        with contextlib.redirect_stdout(self.log), contextlib.redirect_stderr(self.log):
            yield

    def repository(self, name: str, files: Path, parameters: Mapping[str, str]) -> Path:
        """Stage a repository with the version and everything that the graph needs. Raises OSError."""
        config = staged_config(self.model, parameters)
        return stage_version(self.folder / name, self.model, files, config, plan=self.plan)

    def answers(self, repository: Path, rows: DataRows, metric: AnswerMetric) -> list[RowAnswers]:
        """Answers to rows from a mesh over a repository, for each pass of the metric.

        Raises:
            UnavailableError: The mesh does not come up, or does not answer.
            WeftError: The graph rejects such calls.
        """
        start = self.log.tell()
        try:
            with running_mesh(repository, log=self.log) as endpoints:
                return asyncio.run(self._ask(endpoints["router"].grpc, rows, metric))
        except MeshError as error:
            raise UnavailableError(f"the mesh cannot serve it: {last_error(Path(self.log.name), start)}") from error

    async def _ask(self, url: str, rows: DataRows, metric: AnswerMetric) -> list[RowAnswers]:
        places = asyncio.Semaphore(_NUM_INFLIGHT)
        timeout_s = self.timeout_s
        async with V2Client(url) as client:
            target = JobTarget(
                client,
                self.graph,
                self.graph_version,
                outputs=metric.outputs,
                timeout_s=timeout_s,
                patience_s=timeout_s,
                clock_s=time.monotonic,
            )

            async def send(inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
                async with places:
                    try:
                        return await target.infer(inputs, on_busy)
                    except RowsFailed as failure:
                        if failure.error.code != DeadlineExceededError.code:
                            raise
                        num_rows = next(iter(inputs.values())).shape[0] if signature.max_batch_size else 1
                        raise UnavailableError(  # of its rows none is at fault: halves of the request may wait as long
                            f"a request of {num_rows} rows takes longer than {timeout_s:g} s, also when tried "
                            "again; --timeout-ms allows more"
                        ) from failure

            signature = (await target.identify()).signature
            return [
                await answer_rows(
                    rows,
                    make_layout(
                        signature,
                        column_of=column_of,
                        outputs=metric.outputs,
                        binary=[spec.name for spec in signature.outputs if spec.datatype == "BYTES"],
                        rows_per_request=min(signature.max_batch_size, _MAX_ROWS_PER_REQUEST),
                    ),
                    send,
                )
                for column_of in metric.passes
            ]

    def alone(self, name: str, files: Path, parameters: Mapping[str, str]) -> VersionProcess:
        """Start the version in a process of its own.

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


class _RecordingCore(ServingCore):
    """A model service that keeps the inputs of the calls of one model, with the number of the request."""

    def __init__(self, *arguments: Any, model: str, taken: list[tuple[int, Inputs]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._model = model
        self._taken = taken

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if call.model_name == self._model:
            inputs = {name: np.array(decode(tensor, name=name)) for name, tensor in call.inputs.items()}
            self._taken.append((_request.get(), inputs))
        return await super().infer(call, context)


class RecordingMesh:
    """A mesh in this process that serves a repository with all that the graph needs, and records a model's inputs.

    Raises:
        UnavailableError: A model or graph cannot be loaded; the message says why.
    """

    def __init__(self, repository: Path, model: str) -> None:
        self._taken: list[tuple[int, Inputs]] = []
        folders = folders_of_models(repository, tuple(BACKENDS)) or {"model": repository}
        graphs = repository / GRAPH_FOLDER

        def maker(service: str, folder: Path, callee: Callee) -> ServingCore:
            return _RecordingCore(folder, BACKENDS[service], callee=callee, model=model, taken=self._taken)

        self._core = FusedCore(
            {service: partial(maker, service, folder) for service, folder in folders.items()},
            graphs if graphs.is_dir() else repository,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._core.start()
            if not self._core.is_ready():
                index = self._core.index(ready_only=False)
                faults = "; ".join(f"{entry.name}: {entry.reason}" for entry in index if entry.state != "READY")
                raise UnavailableError(f"the repository cannot be served: {faults or 'it is not ready'}")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(RemoteError):
            await self._core.close(grace_s=_GRACE_S)

    def signature(self, graph: str, version: str) -> ModelSignature:
        """Signature of a graph or model. Raises WeftError if it cannot be served."""
        return self._core.signature(graph, version)

    async def record(
        self, graph: str, version: str, rows: DataRows, column_of: Mapping[str, str], *, rows_per_request: int
    ) -> list[Inputs]:
        """Send rows through the graph and return the model's inputs, in the order of the requests.

        Args:
            version: Of the graph; "": the highest.
            column_of: Column of an input, if named differently.
            rows_per_request: Most rows; no more than the graph takes.

        Raises:
            InvalidArgumentError: Every row failed, or the model was not called for any.
        """
        self._taken.clear()
        layout = make_layout(self.signature(graph, version), column_of=column_of, rows_per_request=rows_per_request)
        places = asyncio.Semaphore(_NUM_RECORDED_AT_ONCE)
        numbers = itertools.count()

        async def send(inputs: Mapping[str, WireTensor], on_busy: Callable[[], None]) -> dict[str, Array]:
            num_rows = next(iter(inputs.values())).shape[0] if layout.has_batch else 1
            _request.set(next(numbers))
            async with places:
                try:
                    call = InferCall(graph, version, inputs=dict(inputs), num_rows=num_rows)
                    result = await self._core.infer(call, CallContext())
                except WeftError as error:
                    raise RowsFailed(error, "") from error
            return {name: decode(tensor, name=name) for name, tensor in result.outputs.items()}

        answers = await answer_rows(rows, layout, send)
        if not len(answers.rows):
            first = answers.failed[0]
            raise InvalidArgumentError(
                f"'{graph}' answers none of {len(rows)} rows of '{rows.path}'; the first: {first.status}: "
                f"{first.message}"
            )
        if not self._taken:
            raise InvalidArgumentError(
                f"none of {len(rows)} rows of '{rows.path}' reached the model on their way through '{graph}'; give "
                "data that does, or another --graph"
            )
        return [inputs for _, inputs in sorted(self._taken, key=lambda entry: entry[0])]
