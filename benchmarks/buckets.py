"""``python -m benchmarks.buckets``: CPU of a text through the graph ``embed``, against the libraries in a bare loop.

Texts of mixed length, 32 in work. ``buckets`` is the repository's ``minilm``; ``in process`` is the same with all
services in the router's process; ``exact shapes`` lacks the buckets, so that only texts of equal length share a batch;
``batching off`` lacks ``dynamic_batching``. The floor calls tokenizer,
ONNX Runtime and numpy in a loop, one text after another, in a process of two threads: as many as the service has
instances. All meshes run at once and take turns with the floor, round by round, because the machine may be shared.
Efficiency is the CPU of the floor over that of all services together, the load generator left out.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks import machine, requests
from benchmarks.report import machine_lines, table, write_json
from weft.base.processes.process import Endpoint
from weft.capacity.tuning.load import Bounds, Load, caller, closed_loop
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).resolve().parents[1]
_NUM_TEXTS, _CONCURRENCY, _NUM_THREADS, _MAX_TOKENS = 64, 32, 2, 256
_PARTS = ("graphs/embed", "preprocess/tokenize_minilm", "model/minilm", "postprocess/mean_pool")
_BUCKETS = re.compile(r'parameters \{\s*key: "batch_buckets.*?\}\s*\}', re.DOTALL)
_BATCHING = re.compile(r"dynamic_batching \{.*?\n\}", re.DOTALL)
_SERVICES = ("router", "preprocess", "model", "postprocess")
_MAX_WORDS = (requests.MAX_WORDS, 30)
_IN_PROCESS = "in process"
CASES = ("buckets", _IN_PROCESS, "exact shapes", "batching off")


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one case.

    Attributes:
        case: One of ``CASES``.
        max_words: The texts have 5 to so many words.
        rate_per_s: Answers per second.
        p50_ms, p99_ms: Latency.
        cpu_ms: CPU of all services for one text, milliseconds.
        service_cpu_ms: That of each process, by the service it was started for.
        rows_per_batch: Mean of the model's executions.
        floor_cpu_ms: CPU of the floor for one text.
        floor_rate_per_s: Texts per second of the floor.
        efficiency: ``floor_cpu_ms / cpu_ms``.
        model_efficiency: The same of the model service alone, what batching and its overhead make of the libraries'
            work; None where it has no process of its own.
        num_errors: Failed requests.
    """

    case: str
    max_words: int
    rate_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    service_cpu_ms: dict[str, float]
    rows_per_batch: float
    floor_cpu_ms: float
    floor_rate_per_s: float
    efficiency: float
    model_efficiency: float | None
    num_errors: int


def write_repository(source: Path, repository: Path, case: str) -> None:
    """What ``embed`` needs of a repository, with ``minilm`` configured for the case."""
    for part in _PARTS:
        for path in (source / part).rglob("*"):
            if path.is_file():
                target = repository / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path.resolve())
    config = repository / "model" / "minilm" / "config.pbtxt"
    text = config.read_text()
    if case not in ("buckets", _IN_PROCESS):
        text = _BUCKETS.sub("", text)
    if case == "batching off":
        text = _BATCHING.sub("", text)
    config.unlink()
    config.write_text(text)


def texts(max_words: int) -> list[str]:
    """The benchmarks' texts; a longer one is cut, so that the lengths stay evenly drawn."""
    longest = requests.MAX_WORDS
    words = [text.split() for text in requests.texts(_NUM_TEXTS)]
    return [" ".join(text[: max(requests.MIN_WORDS, len(text) * max_words // longest)]) for text in words]


def run_floor(repository: Path, max_words: int, duration_s: float) -> tuple[float, float]:
    """CPU milliseconds for one text, and texts per second, of a bare loop in a process of its own."""
    command = [
        sys.executable, "-m", "benchmarks.buckets", "--repository", str(repository), "--max-words", str(max_words),
        "--floor", str(duration_s),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    cpu_ms, rate_per_s = done.stdout.split()
    return float(cpu_ms), float(rate_per_s)


def floor(repository: Path, max_words: int, duration_s: float) -> tuple[float, float]:
    """What ``run_floor`` gives, measured in this process."""
    import onnxruntime  # noqa: PLC0415  # the load generator has no use for these
    import tokenizers  # noqa: PLC0415

    sent = texts(max_words)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = str(repository / "model" / "minilm" / "1" / "model.onnx")
    counts = [0] * _NUM_THREADS
    sessions = [
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for _ in range(_NUM_THREADS)
    ]
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(repository / "preprocess/tokenize_minilm/1/tokenizer.json"))
    tokenizer.enable_truncation(_MAX_TOKENS)
    tokenizer.no_padding()

    def loop(index: int) -> None:
        while time.perf_counter() < end_s:
            encoding = tokenizer.encode(sent[(counts[index] * _NUM_THREADS + index) % _NUM_TEXTS])
            ids, mask, types = (
                np.array([row], np.int64) for row in (encoding.ids, encoding.attention_mask, encoding.type_ids)
            )
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            (hidden,) = sessions[index].run(None, inputs)
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            mean /= np.linalg.norm(mean, axis=1, keepdims=True)
            counts[index] += 1

    start_s, cpu_s = time.perf_counter(), time.process_time()
    end_s = start_s + duration_s
    threads = [threading.Thread(target=loop, args=(index,)) for index in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_texts = sum(counts)
    return (time.process_time() - cpu_s) * 1e3 / num_texts, num_texts / (time.perf_counter() - start_s)


class Mesh:
    """The running mesh of one case, and what was measured of it so far."""

    def __init__(self, case: str, endpoints: dict[str, Endpoint]) -> None:
        self.case = case
        self._endpoints = endpoints
        services: dict[int, str] = {}
        for name, endpoint in endpoints.items():
            services.setdefault(endpoint.pid, name)
        self._pids = {name: pid for pid, name in services.items()}
        self._load = Load()
        self._cpu_s = dict.fromkeys(self._pids, 0.0)

    async def run(self, payloads: Sequence[bytes], bounds: Bounds, *, counts: bool = True) -> None:
        """One more load; it is added up unless it only warms up."""
        async with open_channel(self._endpoints["router"].grpc) as channel:
            before_s = machine.cpu_seconds(self._pids)
            load = await closed_loop(caller(channel), payloads, bounds, concurrency=_CONCURRENCY)
            after_s = machine.cpu_seconds(self._pids)
        if counts:
            self._load.latencies_s += load.latencies_s
            self._load.errors += load.errors
            self._load.duration_s += load.duration_s
            for name, seconds in after_s.items():
                self._cpu_s[name] += seconds - before_s[name]

    async def row(self, max_words: int, floor_cpu_ms: float, floor_rate_per_s: float) -> Row:
        """All rounds together."""
        async with open_channel(self._endpoints["model"].grpc) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            (counted,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="minilm"))).model_stats
        num_texts = max(len(self._load.latencies_s), 1)
        cpu_ms = sum(self._cpu_s.values()) * 1e3 / num_texts
        service_cpu_ms = {name: round(cpu_s * 1e3 / num_texts, 2) for name, cpu_s in self._cpu_s.items()}
        model_cpu_ms = service_cpu_ms.get("model")
        return Row(
            self.case,
            max_words,
            round(self._load.rate_per_s, 1),
            round(self._load.percentile_ms(50), 1),
            round(self._load.percentile_ms(99), 1),
            round(cpu_ms, 2),
            service_cpu_ms,
            round(counted.inference_count / max(counted.execution_count, 1), 2),
            round(floor_cpu_ms, 2),
            round(floor_rate_per_s, 1),
            round(floor_cpu_ms / cpu_ms, 3),
            None if model_cpu_ms is None else round(floor_cpu_ms / model_cpu_ms, 3),
            self._load.errors.total(),
        )


def measure(source: Path, max_words: int, cases: Sequence[str], num_rounds: int, duration_s: float) -> list[Row]:
    """One row for each case."""
    payloads = [
        requests.serialize("embed", {"TEXT": np.array([[text]], dtype=np.object_)}) for text in texts(max_words)
    ]
    floors = []
    with ExitStack() as stack:
        meshes = []
        for case in cases:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_repository(source, folder, case)
            arguments = ["--in-process"] if case == _IN_PROCESS else []
            meshes.append(Mesh(case, stack.enter_context(running_mesh(folder, arguments, log=subprocess.DEVNULL))))
        for mesh in meshes:
            asyncio.run(mesh.run(payloads, Bounds(_NUM_TEXTS, duration_s), counts=False))
        for _ in range(num_rounds):
            floors.append(run_floor(source, max_words, duration_s / 2))
            for mesh in meshes:
                asyncio.run(mesh.run(payloads, Bounds(10**9, duration_s)))
        floors.append(run_floor(source, max_words, duration_s / 2))
        floor_cpu_ms, floor_rate_per_s = (sum(values) / len(floors) for values in zip(*floors, strict=True))
        return [asyncio.run(mesh.row(max_words, floor_cpu_ms, floor_rate_per_s)) for mesh in meshes]


def render(rows: Sequence[Row]) -> str:
    """A table with one line for each case."""
    header = [
        "case",
        "words",
        "1/s",
        "p50 ms",
        "p99 ms",
        "CPU-ms",
        *_SERVICES,
        "batch",
        "floor CPU-ms",
        "floor 1/s",
        "efficiency",
        "of model",
        "errors",
    ]
    lines = [
        [
            row.case,
            f"{requests.MIN_WORDS}-{row.max_words}",
            f"{row.rate_per_s:.0f}",
            f"{row.p50_ms:.0f}",
            f"{row.p99_ms:.0f}",
            f"{row.cpu_ms:.1f}",
            *(_figure(row.service_cpu_ms.get(name), 1) for name in _SERVICES),
            f"{row.rows_per_batch:.1f}",
            f"{row.floor_cpu_ms:.1f}",
            f"{row.floor_rate_per_s:.0f}",
            f"{row.efficiency:.2f}",
            _figure(row.model_efficiency, 2),
            str(row.num_errors),
        ]
        for row in rows
    ]
    return table([header, *lines], left_columns=(0, 1))


def _figure(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case is measured without an error, else 1."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.buckets", description="Length buckets against the bare libraries."
    )
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--duration-s", type=float, default=4.0, metavar="S", help="of a case in a round; default: 4")
    parser.add_argument("--only", choices=CASES, action="append", default=[], help="one case; may be repeated")
    parser.add_argument("--max-words", type=int, action="append", default=[], metavar="N", help="default: 200 and 30")
    parser.add_argument("--floor", type=float, metavar="S", help="only the bare loop, for so long; prints two numbers")
    options = parser.parse_args(argv)
    lengths = options.max_words or _MAX_WORDS
    if options.floor:
        print(*floor(options.repository, lengths[0], options.floor))
        return 0
    try:
        rows = [
            row
            for max_words in lengths
            for row in measure(options.repository, max_words, options.only or CASES, options.rounds, options.duration_s)
        ]
    except (MeshError, grpc.aio.AioRpcError) as error:
        print(error, file=sys.stderr)
        return 1
    described = {**machine.describe(), "load_average": os.getloadavg()}
    print("\n".join([*machine_lines(described), "", render(rows)]))
    print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='buckets-')}")
    return 1 if any(row.num_errors for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
