"""``python -m benchmarks.versus_tis --texts``: `embed` of both servers, with the weights as they are and as int8.

Triton Inference Server has the graph as one python model (``tis_embed/``): same tokenizer, threads, instances and limit
of tokens in a batch. The int8 weights are one file, made by the method ``int8-smooth`` of ``weft optimize`` from other
texts, and both servers load it. All four run at once and take turns.
"""

import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import buckets, requests
from benchmarks.report import table
from benchmarks.retrieval_pairs import pairs
from benchmarks.servers import Server, answers, differences, mesh_server
from benchmarks.tis import running_tis
from weft.capacity.tuning.load import Bounds, caller, closed_loop
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "model_repository"
TIS_EMBED = ROOT / "benchmarks" / "tis_embed"

CONCURRENCIES = (1, 8, 32)
#: CPU time of Weft with int8 as a share of that of Triton Inference Server with the weights as they are.
GOAL = 0.5
#: Of answers with int8 by two servers: a value that is rounded the other way in a batch of another size moves them.
_LEAST_COSINE = 0.9999
_NUM_TEXTS, _NUM_COMPARED, _NUM_CALIBRATION = 64, 32, 128
WEFT, TIS = "Weft", "Triton Inference Server"
FP32, INT8 = "fp32", "int8"


class TextServer(NamedTuple):
    """One of the four: whose it is, and with which weights."""

    product: str
    weights: str
    server: Server


@dataclass(frozen=True, slots=True)
class TextRow:
    """Figures of one server, medians over the rounds.

    Attributes:
        product, weights: Which server.
        concurrency: Requests in work at once, of one text each.
        rate_per_s: Answers per second.
        p50_ms, p99_ms: Of the latency.
        cpu_s_per_1000: CPU-seconds of all processes of the server for 1000 texts.
        share: Of the CPU time of Triton Inference Server with fp32, in the same round.
        num_errors: Failed requests, in all rounds.
    """

    product: str
    weights: str
    concurrency: int
    rate_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float
    share: float
    num_errors: int


def write_int8(folder: Path) -> Path:
    """The file of MiniLM as ``int8-smooth`` makes it."""
    import tokenizers  # noqa: PLC0415  # the benchmark of the other models does without
    from google.protobuf import text_format  # noqa: PLC0415

    from weft.optimize.methods import METHODS  # noqa: PLC0415
    from weft.optimize.methods.method import SourceModel  # noqa: PLC0415
    from weft_protos.model_config_pb2 import ModelConfig  # noqa: PLC0415

    tokenizer: Any = tokenizers.Tokenizer.from_file(str(SAMPLES / "preprocess/tokenize_minilm/1/tokenizer.json"))
    tokenizer.no_padding()
    batches = []
    for pair in pairs()[:_NUM_CALIBRATION]:
        ids = np.array([tokenizer.encode(pair.passage).ids])
        batches.append({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    model = SAMPLES / "model" / "minilm"
    config = text_format.Parse((model / "config.pbtxt").read_text(), ModelConfig())
    built = METHODS["int8-smooth"].build(
        SourceModel("minilm", model / "1", config, model / "1" / "model.onnx"), batches, folder
    )
    print(f"int8: {built.notes}", file=sys.stderr)
    return folder / "model.onnx"


@contextlib.contextmanager
def running_servers(folder: Path, results: Path) -> Iterator[list[TextServer]]:
    """All four, ended with the block. Raises MeshError or RuntimeError where one does not come up."""
    (folder / "int8").mkdir(parents=True)
    int8 = write_int8(folder / "int8")
    with contextlib.ExitStack() as stack:
        mesh_log: Any = stack.enter_context((results / "mesh.log").open("w"))
        tis_log: Any = stack.enter_context((results / "tis.log").open("w"))
        found = []
        for weights in (FP32, INT8):
            repository = folder / f"weft-{weights}"
            buckets.write_repository(SAMPLES, repository, "buckets")
            theirs = TIS_EMBED
            if weights == INT8:
                file = repository / "model" / "minilm" / "1" / "model.onnx"
                file.unlink()
                file.symlink_to(int8)
                theirs = _tis_repository(folder / "tis", int8)
            endpoints = stack.enter_context(running_mesh(repository, ["--in-process"], log=mesh_log))
            found.append(TextServer(WEFT, weights, mesh_server(f"{WEFT}, {weights}", endpoints)))
            server = stack.enter_context(running_tis(theirs, tis_log))
            found.append(TextServer(TIS, weights, server._replace(name=f"{TIS}, {weights}")))
        yield found


def _tis_repository(folder: Path, weights: Path) -> Path:
    """``tis_embed`` with other weights."""
    (folder / "embed" / "1").mkdir(parents=True)
    (folder / "embed" / "1" / "model.py").symlink_to(TIS_EMBED / "embed" / "1" / "model.py")
    shutil.copyfile(TIS_EMBED / "embed" / "config.pbtxt", folder / "embed" / "config.pbtxt")
    with (folder / "embed" / "config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "WEIGHTS" value {{ string_value: "{weights}" }} }}\n')
    return folder


async def compare_texts(
    servers: Sequence[TextServer], bounds: Bounds, num_rounds: int, num_warmups: int
) -> list[TextRow]:
    """Each server at each concurrency, in turn. Raises RuntimeError where answers differ."""
    payloads = requests.text_requests("embed", "TEXT", (1, 1), _NUM_TEXTS)
    print(await _compared(servers, payloads[:_NUM_COMPARED]), file=sys.stderr)
    measured: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    errors: dict[tuple[int, int], int] = {}
    async with contextlib.AsyncExitStack() as stack:
        calls = [caller(await stack.enter_async_context(open_channel(one.server.address))) for one in servers]
        for call in calls:
            for number in range(num_warmups):
                await call(payloads[number % len(payloads)])
        for turn in range(num_rounds):
            for concurrency in CONCURRENCIES:
                used = {}
                for index in range(len(servers)) if turn % 2 else reversed(range(len(servers))):
                    before_s = servers[index].server.cpu_s()
                    load = await closed_loop(calls[index], payloads, bounds, concurrency=concurrency)
                    key, cpu_s = (concurrency, index), servers[index].server.cpu_s() - before_s
                    used[index] = cpu_s / max(len(load.latencies_s), 1) * 1000
                    errors[key] = errors.get(key, 0) + load.errors.total()
                    latency = load.percentile_ms(50), load.percentile_ms(99)
                    measured.setdefault(key, []).append((load.rate_per_s, *latency, used[index]))
                theirs = next(used[i] for i, one in enumerate(servers) if (one.product, one.weights) == (TIS, FP32))
                for index, cpu in used.items():
                    measured[concurrency, index][-1] += (cpu / theirs,)
            print(f"round {turn + 1} of {num_rounds}", file=sys.stderr)
    return [
        TextRow(
            servers[index].product,
            servers[index].weights,
            concurrency,
            *(round(statistics.median(column), 4) for column in zip(*figures, strict=True)),
            errors[concurrency, index],
        )
        for (concurrency, index), figures in sorted(measured.items())
    ]


async def _compared(servers: Sequence[TextServer], payloads: Sequence[bytes]) -> str:
    found = {(one.product, one.weights): await answers(one.server.address, payloads) for one in servers}
    if different := differences(found[WEFT, FP32], found[TIS, FP32]):
        raise RuntimeError(f"answers with fp32 differ: {'; '.join(different[:3])}")
    vectors = {key: np.concatenate([one["EMBEDDING"] for one in some]) for key, some in found.items()}
    both = float((vectors[WEFT, INT8] * vectors[TIS, INT8]).sum(1).min())
    if both < _LEAST_COSINE:
        raise RuntimeError(f"answers with int8 differ: least cosine {both:.5f}")
    lost = float((vectors[WEFT, INT8] * vectors[WEFT, FP32]).sum(1).mean())
    return f"{len(payloads)} answers of both servers are equal; mean cosine of int8 with fp32 {lost:.4f}"


def render_texts(rows: Sequence[TextRow]) -> str:
    """One line for each server and concurrency."""
    head = [
        "at once",
        "server",
        "weights",
        "texts/s",
        "p50 ms",
        "p99 ms",
        "CPU-s per 1000",
        "share of TIS fp32",
        "errors",
    ]
    lines = [head]
    for row in rows:
        figures = (f"{row.rate_per_s:.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}", f"{row.cpu_s_per_1000:.2f}")
        lines.append(
            [str(row.concurrency), row.product, row.weights, *figures, f"{row.share:.2f}", str(row.num_errors)]
        )
    return table(lines, left_columns=(1, 2))


def misses_goal(rows: Sequence[TextRow]) -> list[str]:
    """What is dearer than it should be, or failed; empty if nothing."""
    missed = [f"{row.product} {row.weights}: {row.num_errors} errors" for row in rows if row.num_errors]
    for row in rows:
        if (row.product, row.weights) == (WEFT, INT8) and row.share > GOAL:
            missed.append(f"{row.concurrency} at once: {row.share:.2f} of the CPU time, the goal is {GOAL}")
    return missed


def measure_texts(results: Path, *, is_quick: bool) -> list[TextRow]:
    """Start the servers, compare and measure."""
    bounds, num_rounds, num_warmups = (Bounds(20, 1.0), 1, 2) if is_quick else (Bounds(20_000, 4.0), 3, 20)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, running_servers(Path(folder), results) as servers:
        return asyncio.run(compare_texts(servers, bounds, num_rounds, num_warmups))
