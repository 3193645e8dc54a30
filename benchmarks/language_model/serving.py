"""What serving adds to the engine: the same jobs over gRPC, one stream each, against the engine in this process."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.language_model.drive import Driver, Run, run_burst
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import MAX_MODEL_LEN, WEIGHTS_SEED, Model, hugging_face_config
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, mixed
from benchmarks.service import running_model_service
from weft.base.processes.process import Endpoint

_CASE = "serving"
_MODEL = "benchmark"
_NOTE = (
    "The model service in a process of its own and 16 streams of tritonclient.grpc.aio at once, one response a token, "
    "against the same jobs given to an engine in this process. CPU-seconds are from /proc; the client shares the cores."
)


class Served(NamedTuple):
    """What one run over gRPC gave.

    Attributes:
        token_ids: New tokens of each job.
        duration_s: Wall time.
        cpu_s: CPU-seconds by process.
    """

    token_ids: list[list[int]]
    duration_s: float
    cpu_s: dict[str, float]


def write_repository(root: Path, model: Model, sizes: Sizes) -> None:
    """A repository with the model; its weights are drawn by the service, and are those of ``model``."""
    folder = root / _MODEL / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(model.shape)))
    parameters = {
        "load_format": "dummy",
        "seed": WEIGHTS_SEED,
        "max_num_seqs": sizes.num_slots,
        "max_num_batched_tokens": sizes.num_step_tokens,
        "max_model_len": MAX_MODEL_LEN,
    }
    spelled = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    text = f'backend: "llm"\ninstance_group [ {{ count: 1 kind: KIND_CPU }} ]\n{spelled}'
    (root / _MODEL / "config.pbtxt").write_text(text)


async def run_streams(address: str, pids: dict[str, int], jobs: Sequence[Job], num_streams: int) -> Served:
    """Every job once, ``num_streams`` at a time.

    Raises:
        tritonclient.utils.InferenceServerException: A request failed.
    """
    from tritonclient.grpc import aio  # noqa: PLC0415  # only this case needs it

    token_ids: list[list[int]] = [[] for _ in jobs]
    numbers = iter(range(len(jobs)))

    async def work(client: Any) -> None:
        for number in numbers:
            async for result, error in client.stream_infer(_one(jobs[number])):
                if error is not None:
                    raise error
                ids = result.as_numpy("output_ids")
                if ids is not None:
                    token_ids[number] += ids.tolist()

    async with aio.InferenceServerClient(address) as client:
        before_s, start_s = machine.cpu_seconds(pids), time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(num_streams):
                workers.create_task(work(client))
        duration_s, after_s = time.perf_counter() - start_s, machine.cpu_seconds(pids)
    return Served(token_ids, duration_s, {name: after_s[name] - before_s[name] for name in pids})


def stream_request(prompt: Any, num_tokens: int, outputs: Sequence[str], **more: Any) -> dict[str, Any]:
    """What tritonclient streams: the greedy answer of ``num_tokens`` to token ids; ``more``: other fields of it."""
    from tritonclient.grpc import InferInput, InferRequestedOutput  # noqa: PLC0415  # only these cases need it

    sampling = json.dumps({"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}).encode()
    arrays = {
        "input_ids": ("INT32", prompt),
        "stream": ("BOOL", np.array([True])),
        "sampling_parameters": ("BYTES", np.array([sampling], np.object_)),
    }
    inputs = []
    for name, (datatype, array) in arrays.items():
        inputs.append(InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return {"model_name": _MODEL, "inputs": inputs, "outputs": [*map(InferRequestedOutput, outputs)], **more}


async def _one(job: Job) -> AsyncIterator[dict[str, Any]]:
    yield stream_request(job.prompt, job.num_tokens, ["output_ids"])


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Rates, CPU time by process, and whether the tokens are the same."""
    jobs = mixed(sizes.serving_jobs, model.shape.vocab_size)
    config = model.engine_config(max_num_seqs=sizes.num_slots, max_num_batched_tokens=sizes.num_step_tokens)
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), model, sizes)
        with running_model_service(Path(folder)) as endpoint:
            return _measure(model, sizes, jobs, config, endpoint)


def _measure(model: Model, sizes: Sizes, jobs: Sequence[Job], config: Any, endpoint: Endpoint) -> list[Figure]:
    pids = {"service": endpoint.pid, "client": os.getpid()}
    served: list[Served] = []
    own: list[Run] = []
    asyncio.run(run_streams(endpoint.grpc, pids, jobs[: sizes.num_slots], sizes.num_slots))  # not counted
    for _ in range(sizes.num_rounds):
        own.append(run_burst(Driver(model, config), jobs))
        served.append(asyncio.run(run_streams(endpoint.grpc, pids, jobs, sizes.num_slots)))
    thousands = own[0].num_tokens / 1000
    expected = [answer.token_ids for answer in own[0].answers]
    num_different = [sum(a != b for a, b in zip(one.token_ids, expected, strict=True)) for one in served]
    engine_s = [run.cpu_s / thousands for run in own]
    service_s = [one.cpu_s["service"] / thousands for one in served]
    unit = "CPU-s per 1000 tokens"
    return [
        figure(_CASE, "engine in process", [run.tokens_per_s for run in own], "tokens/s", note=_NOTE),
        figure(_CASE, "over gRPC", [1000 * thousands / one.duration_s for one in served], "tokens/s", note=_NOTE),
        figure(_CASE, "engine in process", engine_s, unit),
        figure(_CASE, "over gRPC, model service", service_s, unit),
        figure(_CASE, "over gRPC, client", [one.cpu_s["client"] / thousands for one in served], unit),
        figure(_CASE, "model service less engine", [a - b for a, b in zip(service_s, engine_s, strict=True)], unit),
        figure(_CASE, "answers unequal to the engine's", num_different, "answers", target=Target("=", 0)),
    ]
