"""The model's own inputs, recorded while rows go through the graph that calls it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, RemoteError, UnavailableError, WeftError
from weft.base.repository.layout import folders_of_models
from weft.base.signature import ModelSignature
from weft.base.tensors import Array, decode
from weft.jobs.columns import InputValues
from weft.jobs.layout import make_layout
from weft.jobs.target import RowsFailed
from weft.mesh.fused import FusedCore
from weft.optimize.answers import answer_rows
from weft.optimize.methods.method import Inputs
from weft.optimize.rows import DataRows
from weft.serving.calls import Callee
from weft.serving.core import ServingCore
from weft.tools.offline import BACKENDS, GRAPH_FOLDER

#: Requests through the graph at once.
_NUM_INFLIGHT = 8
_GRACE_S = 20.0

#: Number of the first row of the request that is answered.
_row: ContextVar[int] = ContextVar("row", default=0)


class RecordingCore(ServingCore):
    """A model service that keeps the inputs of the calls of one model.

    Args:
        model: Its name.
        taken: Receives the number of the row that a call is for, and the inputs.
    """

    def __init__(self, *arguments: Any, model: str, taken: list[tuple[int, Inputs]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._model = model
        self._taken = taken

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        if call.model_name == self._model:
            inputs = {name: np.array(decode(tensor, name=name)) for name, tensor in call.inputs.items()}
            self._taken.append((_row.get(), inputs))
        return await super().infer(call, context)


class RecordingMesh:
    """A mesh in this process that serves a repository and records the inputs of one model.

    Args:
        core: RowAnswers.
        taken: What was recorded.
    """

    def __init__(self, core: FusedCore, taken: list[tuple[int, Inputs]]) -> None:
        self._core = core
        self._taken = taken

    def signature(self, graph: str, version: str = "") -> ModelSignature:
        """Of a graph or model. Raises WeftError if it cannot be served."""
        return self._core.signature(graph, version)

    async def record(
        self, graph: str, version: str, rows: DataRows, column_of: Mapping[str, str], *, rows_per_request: int
    ) -> list[Inputs]:
        """Send rows through the graph and return the inputs that the model was given, in the order of the rows.

        Args:
            graph: Graph or model.
            version: Of it; "": the highest.
            rows: The data.
            column_of: Column of an input, where it has another name.
            rows_per_request: At most; no more than the graph takes.

        Raises:
            InvalidArgumentError: Every row failed, or the model was not called for any.
        """
        self._taken.clear()
        signature = self.signature(graph, version)
        layout = make_layout(signature, column_of=column_of, rows_per_request=rows_per_request)
        places = asyncio.Semaphore(_NUM_INFLIGHT)

        async def send(
            inputs: Mapping[str, InputValues], indices: Sequence[int], on_busy: Callable[[], None]
        ) -> dict[str, Array]:
            call = InferCall(graph, version, inputs=layout.tensors(inputs, indices), num_rows=len(indices))
            _row.set(indices[0])
            async with places:
                try:
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


@contextlib.asynccontextmanager
async def recording_mesh(repository: Path, model: str) -> AsyncIterator[RecordingMesh]:
    """Serve a repository in this process, within the block.

    Args:
        repository: With all that the graph needs.
        model: Name of the model whose inputs are recorded.

    Raises:
        UnavailableError: A model or graph cannot be loaded; the message says why.
    """
    taken: list[tuple[int, Inputs]] = []
    folders = folders_of_models(repository, tuple(BACKENDS)) or {"model": repository}
    graphs = repository / GRAPH_FOLDER

    def maker(service: str, folder: Path, callee: Callee) -> ServingCore:
        return RecordingCore(folder, BACKENDS[service], callee=callee, model=model, taken=taken)

    core = FusedCore(
        {service: partial(maker, service, folder) for service, folder in folders.items()},
        graphs if graphs.is_dir() else repository,
    )
    try:
        await core.start()
        if not core.is_ready():
            raise UnavailableError(f"the repository cannot be served: {'; '.join(_faults(core)) or 'it is not ready'}")
        yield RecordingMesh(core, taken)
    finally:
        with contextlib.suppress(RemoteError):
            await core.close(grace_s=_GRACE_S)


def _faults(core: FusedCore) -> list[str]:
    return [f"{entry.name}: {entry.reason}" for entry in core.index(ready_only=False) if entry.state != "READY"]
