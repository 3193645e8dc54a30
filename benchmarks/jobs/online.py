"""``online``: what requests of priority 1 notice of a batch job at the lowest priority on the same mesh.

And what they notice of a process that has nothing to do with the mesh, computes the same model on one thread, and runs
only while a processor has nothing else to do: what processors share, caches and memory, costs that much without a job.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.jobs.datasets import write_texts
from benchmarks.jobs.mesh import ROOT, write_repository
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.requests import SEED, texts
from weft.base.core import InferCall
from weft.base.tensors import encode
from weft.capacity.tuning.load import Bounds, Load, caller, open_loop
from weft.mesh.running import running_mesh
from weft.v2.client.channels import open_channel
from weft.v2.protocol.encoding import serialize_call

_CASE = "online"
_RATE_PER_S = 12.0
_MAX_WORDS = 60
_NUM_TEXTS = 200_000
_START_S = 4.0
_NOTE = (
    f"`embed`, texts of 5 to {_MAX_WORDS} words, {_RATE_PER_S:g} Poisson arrivals a second at priority 1: alone, "
    "beside `weft batch` over texts of the same lengths, and beside a process of SCHED_IDLE that computes MiniLM and "
    "knows nothing of the mesh, in turn; percentiles of all rounds together. Model, services, job and load generator "
    "share the cores."
)
#: Computes MiniLM, 12 rows of 40 tokens at a time, while a processor has nothing else to do.
_COMPUTE = """
import os, sys
import numpy as np, onnxruntime
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
inputs = {each.name: np.ones((12, 40), np.int64) for each in session.get_inputs()}
while True:
    session.run(None, inputs)
"""


def measure(num_rounds: int, duration_s: float) -> list[Figure]:
    """Rounds of all three, each of ``duration_s``."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_texts(root / "texts", _NUM_TEXTS, has_bad_rows=False, most_words=_MAX_WORDS)
        repository = write_repository(root / "repository", "embed")
        with (root / "mesh.log").open("a") as log, running_mesh(repository, log=log) as endpoints:
            return asyncio.run(_measure(endpoints["router"].grpc, root, num_rounds, duration_s))


async def _measure(url: str, root: Path, num_rounds: int, duration_s: float) -> list[Figure]:
    requests = [_request(text, number) for number, text in enumerate(texts(500, seed=SEED + 1))]
    alone, beside, beside_other = Load(), Load(), Load()
    num_rows = 0
    async with open_channel(url) as channel:
        call = caller(channel)
        await open_loop(call, requests, Bounds(50, 10.0), rate_per_s=_RATE_PER_S, seed=0)
        for number in range(num_rounds):
            bounds = Bounds(10**9, duration_s)
            _add(alone, await open_loop(call, requests, bounds, rate_per_s=_RATE_PER_S, seed=SEED + number))
            output = root / f"job-{number}"
            with _running(_job(url, root / "texts", output)):
                await asyncio.sleep(_START_S)
                before = _num_rows(output)
                _add(beside, await open_loop(call, requests, bounds, rate_per_s=_RATE_PER_S, seed=SEED + number))
                num_rows += _num_rows(output) - before
            await asyncio.sleep(1.0)  # what the job had in flight
            with _running([sys.executable, "-c", _COMPUTE, str(ROOT / "model_repository/model/minilm/1/model.onnx")]):
                await asyncio.sleep(_START_S)
                _add(beside_other, await open_loop(call, requests, bounds, rate_per_s=_RATE_PER_S, seed=SEED + number))
    errors = alone.errors.total() + beside.errors.total() + beside_other.errors.total()
    of_job, of_other = (
        {percent: load.percentile_ms(percent) / alone.percentile_ms(percent) for percent in (50, 99)}
        for load in (beside, beside_other)
    )
    target = Target("<=", 1.1)
    return [
        figure(
            _CASE, "p99 of online requests beside a job, by that alone", [of_job[99]], "", target=target, note=_NOTE
        ),
        figure(_CASE, "p50 likewise", [of_job[50]], ""),
        figure(_CASE, "p99 beside a process that computes the same model", [of_other[99]], ""),
        figure(_CASE, "p50 likewise", [of_other[50]], ""),
        figure(_CASE, "p99 alone", [alone.percentile_ms(99)], "ms"),
        figure(_CASE, "p99 beside a job", [beside.percentile_ms(99)], "ms"),
        figure(_CASE, "online requests that failed", [errors], "", target=Target("=", 0)),
        figure(_CASE, "rows of the job meanwhile", [num_rows / (num_rounds * duration_s)], "rows/s"),
    ]


def _request(text: str, number: int) -> bytes:
    words = " ".join(text.split()[: 5 + number * 7 % (_MAX_WORDS - 4)])
    inputs = {"TEXT": encode(np.array([[words]], dtype=np.object_))}
    return serialize_call(InferCall("embed", parameters={"priority": 1}, inputs=inputs))


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """A process, with all that it starts, until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _job(url: str, source: Path, output: Path) -> list[str]:
    return [
        sys.executable, "-P", "-m", "weft.cli", "batch", "embed", "--input", str(source), "--output", str(output),
        "--column", "TEXT=sentence", "--rows-per-shard", "64", "--output-format", "jsonl", "--url", url,
    ]  # fmt: skip


def _num_rows(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (output / "rows").glob("part-*.jsonl"))


def _add(total: Load, part: Load) -> None:
    total.latencies_s += part.latencies_s
    total.errors += part.errors
    total.duration_s += part.duration_s
