"""Held-out rows through a mesh of real services, answered by one version of the model."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from weft.base.errors import DeadlineExceededError, UnavailableError
from weft.base.tensors import Array
from weft.jobs.columns import InputValues
from weft.jobs.layout import Layout, make_layout
from weft.jobs.target import JobTarget, RowsFailed
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.optimize.answers import RowAnswers, answer_rows
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
