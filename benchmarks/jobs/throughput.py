"""``throughput``: a batch job against a bare loop over the same client that does nothing but ask."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.jobs.mesh import write_repository
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.requests import SEED, texts
from weft.base.core import InferCall
from weft.base.tensors import Array, decode, encode
from weft.jobs.batch import BatchOptions, run_batch
from weft.mesh.running import running_mesh
from weft.v2.client.v2_client import V2Client

_CASE = "throughput"
_WINDOWS = (4, 8, 16, 32)
_NUM_ROUNDS = 7
_TIMEOUT_S = 60.0
_MAX_WORDS = 40
_NOTE = (
    "Parquet in, Parquet out, the same rows in a request. The bare loop reads the file, holds a fixed number of "
    f"requests in flight, the best of {', '.join(map(str, _WINDOWS))}, and writes one file; it checks nothing, retries "
    "nothing and cannot be resumed. In turn, ratios of neighbours; CPU-seconds are the client's."
)


class _Case(NamedTuple):
    """A graph, its columns by input, and how many rows a request has."""

    graph: str
    columns: dict[str, Array]
    rows_per_request: int


class _Spent(NamedTuple):
    """What one run took."""

    duration_s: float
    cpu_s: float


def measure(num_rows: int, num_texts: int) -> list[Figure]:
    """Both graphs, in turn."""
    draw = np.random.default_rng(SEED)
    numbers = {name: draw.integers(0, 2**30, (num_rows, 16), dtype=np.int32) for name in ("INPUT0", "INPUT1")}
    sentences = np.array(
        [" ".join(text.split()[: 5 + n % _MAX_WORDS]) for n, text in enumerate(texts(num_texts))], object
    )
    cases = [_Case("simple", numbers, 8), _Case("embed", {"TEXT": sentences.reshape(-1, 1)}, 32)]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        repository = write_repository(root / "repository", *(case.graph for case in cases))
        with (root / "mesh.log").open("a") as log, running_mesh(repository, log=log) as endpoints:
            for case in cases:
                figures += asyncio.run(_measure(case, endpoints["router"].grpc, root))
    return figures


async def _measure(case: _Case, url: str, root: Path) -> list[Figure]:
    source = root / f"{case.graph}.parquet"
    columns = {
        name: [row[0] for row in rows] if rows.dtype == object else list(rows) for name, rows in case.columns.items()
    }
    pq.write_table(pa.table(columns), source)
    num_rows = len(next(iter(case.columns.values())))
    async with V2Client(url) as client:

        def bare(window: int) -> Coroutine[Any, Any, None]:
            return _bare(client, case, source, root / "bare.parquet", window)

        async def job(number: int) -> None:
            output = root / f"{case.graph}-{number}"
            await run_batch(
                client, BatchOptions(case.graph, str(source), output, rows_per_request=case.rows_per_request)
            )

        await bare(max(_WINDOWS))
        tried = {window: (await _spent(lambda window=window: bare(window))).duration_s for window in _WINDOWS}
        best = min(tried, key=lambda window: tried[window])
        await job(-1)
        rates, costs, speeds = [], [], []
        for number in range(_NUM_ROUNDS):
            own, other = await _spent(lambda number=number: job(number)), await _spent(lambda: bare(best))
            rates.append(other.duration_s / own.duration_s)
            costs.append(own.cpu_s / other.cpu_s)
            speeds.append(num_rows / own.duration_s)
    what = f"{case.graph}: job of {num_rows} rows"
    return [
        figure(_CASE, f"{what}, rows/s by those of a bare loop", rates, "", target=Target(">=", 0.9), note=_NOTE),
        figure(_CASE, f"{what}, CPU by that of a bare loop of {best}", costs, ""),
        figure(_CASE, what, speeds, "rows/s"),
    ]


async def _spent(run: Callable[[], Coroutine[Any, Any, None]]) -> _Spent:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    await run()
    return _Spent(time.perf_counter() - start_s, time.process_time() - start_cpu_s)


async def _bare(client: V2Client, case: _Case, source: Path, output: Path, window: int) -> None:
    table = pq.read_table(source)
    inputs: dict[str, Array] = {}
    for name in case.columns:
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            inputs[name] = column.flatten().to_numpy().reshape(len(table), -1)
        else:
            inputs[name] = column.cast(pa.binary()).to_numpy(zero_copy_only=False).reshape(-1, 1)
    starts = iter(range(0, len(table), case.rows_per_request))
    answers: dict[int, dict[str, Array]] = {}

    async def ask() -> None:
        for start in starts:
            end = start + case.rows_per_request
            tensors = {name: encode(rows[start:end]) for name, rows in inputs.items()}
            call = InferCall(case.graph, inputs=tensors)
            result = await client.infer(call, timeout_s=_TIMEOUT_S)
            answers[start] = {name: decode(tensor, name=name) for name, tensor in result.outputs.items()}

    await asyncio.gather(*(ask() for _ in range(window)))
    ordered = [answers[start] for start in sorted(answers)]
    outputs = {name: np.concatenate([answer[name] for answer in ordered]) for name in ordered[0]}
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        for name, rows in outputs.items()
    }
    pq.write_table(pa.table({"row": np.arange(len(table)), **columns}), output, compression="zstd")
