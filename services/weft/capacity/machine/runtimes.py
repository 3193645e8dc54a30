"""Measures a model service's overhead: memory of each runtime, and time of a request.

It serves synthetic models: of a few numbers, and language models of a few layers with random weights.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from weft.base.core import InferCall
from weft.base.errors import UnavailableError
from weft.base.processes.process import running_child
from weft.base.tensors import Array, encode
from weft.capacity.machine.onnx_times import best_run_s, make_session, several
from weft.capacity.machine.profile import EngineTimes, Runtimes
from weft.v2.client.v2_client import V2Client

_CONFIG = """backend: "{backend}"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "x_out" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "{threads}" value {{ string_value: "{num_threads}" }} }}
"""
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_LLM_CONFIG = """backend: "llm"
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "load_format" value {{ string_value: "dummy" }} }}
parameters {{ key: "num_blocks" value {{ string_value: "64" }} }}
parameters {{ key: "max_num_seqs" value {{ string_value: "16" }} }}
parameters {{ key: "num_threads" value {{ string_value: "{num_threads}" }} }}
"""
_LARGE = 1 << 18
_FEW_LAYERS, _MANY_LAYERS = 2, 10
_FEW_TOKENS, _MANY_TOKENS = 8, 72
_AT_ONCE = 8
#: Starts of each service: for seconds on end a shared machine may take half as long again for a request.
_NUM_STARTS = 3
_TIMEOUT_S = 120.0
_ROUNDS, _ROUND_S = 8, 0.08


class RequestCost(NamedTuple):
    """A request's wall time, and CPU time of the service."""

    wall_s: float
    cpu_s: float

    def best(self, other: "RequestCost") -> "RequestCost":
        """The lesser of each figure."""
        return RequestCost(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


class ModelService(NamedTuple):
    """A running service: address of its V2 service, its process, the threads that a model computes on."""

    address: str
    pid: int
    num_threads: int = 1

    def rss_bytes(self) -> int:
        """Resident memory of its process once it is stable: the least of several readings."""
        looks = []
        for _ in range(3):
            time.sleep(0.1)
            status = Path(f"/proc/{self.pid}/status").read_text()
            found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
            looks.append(int(found[1]) << 10 if found else 0)
        return min(looks)

    def cpu_s(self) -> float:
        """CPU time of its threads so far, in nanosecond resolution if the kernel has it."""
        total_s = 0.0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it ended, or the kernel does not keep it
                total_s += int((thread / "schedstat").read_text().split()[0]) / 1e9
        return total_s

    def answered(self, call: InferCall, *, num_at_once: int = 1) -> RequestCost:
        """Send a request repeatedly; return the best of several rounds, per request of each caller.

        Raises:
            WeftError: It failed.
        """
        with self._apart():
            return asyncio.run(self._answered(call, num_at_once))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Put client and service on separate processors for the length of the block.

        Where the operating system places them, a request of 0.2 ms takes from 0.18 to 0.30 ms, from one start of the
        service to the next; apart 0.22 (2 cores). If a model computes on all processors, only the thread that talks
        to the client keeps away from it.
        """
        before = os.sched_getaffinity(0)
        *others, last = sorted(before)
        if not others:
            yield
            return
        threads = [path.name for path in Path(f"/proc/{self.pid}/task").iterdir()]
        kept = threads if self.num_threads <= len(others) else [str(self.pid)]
        try:
            for thread in kept:
                _set_processors(int(thread), others)
            os.sched_setaffinity(0, {last})
            yield
        finally:
            os.sched_setaffinity(0, before)
            for thread in kept:
                _set_processors(int(thread), before)

    async def _answered(self, call: InferCall, num_at_once: int) -> RequestCost:
        async with V2Client(self.address) as client:

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    for _ in range(num_at_once):
                        group.create_task(client.infer(call, timeout_s=_TIMEOUT_S))

            start = time.perf_counter()
            await together()
            await together()
            once_s = (time.perf_counter() - start) / 2
            runs = max(math.ceil(_ROUND_S / once_s), 2)
            best = RequestCost(math.inf, math.inf)
            for _ in range(_ROUNDS if once_s < 1 else 2):
                walls, before = [], self.cpu_s()
                for _ in range(runs):
                    start = time.perf_counter()
                    await together()
                    walls.append(time.perf_counter() - start)
                cpu_s = (self.cpu_s() - before) / runs
                best = best.best(RequestCost(sorted(walls)[len(walls) // 2], cpu_s))
        return best


@contextmanager
def running_service(repository: Path, *, num_threads: int = 1) -> Iterator[ModelService]:
    """A model service with every model of a folder, on a free port; it ends with the block.

    Raises:
        UnavailableError: It did not start; its log, on standard error, says why.
    """
    command = [
        sys.executable, "-P", "-m", "weft.services.model", "--repository", str(repository), "--grpc-port", "0",
        "--metrics-port", "0", "--stop-with-stdin", "--log-level", "error",
    ]  # fmt: skip

    def ended(status: int) -> UnavailableError:
        return UnavailableError(f"the model service ended with exit status {status}")

    with running_child(command, ended, timeout_s=_TIMEOUT_S) as (endpoint, process_id):
        yield ModelService(endpoint["grpc"], process_id, num_threads)


def call_of(model: str, inputs: Mapping[str, Array], parameters: Mapping[str, int | str] | None = None) -> InferCall:
    """A request for a model; the first dimension of every input is the batch."""
    tensors = {name: encode(array) for name, array in inputs.items()}
    rows = next(iter(tensors.values())).shape[0] if tensors else 1
    return InferCall(model, inputs=tensors, parameters=dict(parameters or {}), num_rows=int(rows))


def _set_processors(thread: int, processors: Iterable[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, processors)


def measure_runtimes(num_threads: int) -> Runtimes:
    """Start services of each backend in turn; takes about twenty seconds."""
    memory: dict[str, int] = {}
    with TemporaryDirectory() as folder, running_service(Path(folder)) as service:
        memory[""] = service.rss_bytes()
    small = call_of("small", {"x": np.ones((1, 4), np.float32)})
    with TemporaryDirectory() as folder:
        _write(Path(folder) / "large", "onnxruntime", _LARGE, num_threads)
        with running_service(Path(folder), num_threads=num_threads) as service:
            large = service.answered(call_of("large", {"x": np.ones((1, _LARGE), np.float32)}))
    answers = dict.fromkeys(_THREADS, RequestCost(math.inf, math.inf))
    with TemporaryDirectory() as folder:
        for backend in _THREADS:
            _write(Path(folder) / backend / "small", backend, 4, num_threads)
        for backend in (*_THREADS,) * _NUM_STARTS:
            with running_service(Path(folder) / backend, num_threads=num_threads) as service:
                memory[backend] = service.rss_bytes()
                answers[backend] = answers[backend].best(service.answered(small))
    from weft.capacity.machine.torch_times import measure_torch_times  # noqa: PLC0415  # torch, which takes seconds

    # The smallest call of each, which a request's time is given without.
    program = measure_torch_times(num_threads)
    run_s = {
        "onnxruntime": best_run_s(make_session(several((1, 4), 1), num_threads), (1, 4)),
        "pytorch": program.run_s + program.node_s,
    }
    return Runtimes(
        memory,
        {name: max(answered.wall_s - run_s[name], 1e-6) for name, answered in answers.items()},
        {name: max(answered.cpu_s - run_s[name], 1e-6) for name, answered in answers.items()},
        max((large.cpu_s - answers["onnxruntime"].cpu_s) / (2.0 * 4 * (_LARGE - 4)), 1e-12),
    )


def measure_engine(num_threads: int) -> EngineTimes:
    """Times of the engine, and memory of a service with one; takes about fifteen seconds."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name, num_layers in (("few", _FEW_LAYERS), ("many", _MANY_LAYERS)):
            _write_llm(root / name, num_layers, num_threads)
        with running_service(root, num_threads=num_threads) as service:
            few, few_short = _token_s(service, "few", 1)
            many, _ = _token_s(service, "many", 1)
            together, together_short = _token_s(service, "few", _AT_ONCE)
    with TemporaryDirectory() as folder:
        _write_llm(Path(folder) / "few", _FEW_LAYERS, num_threads)
        with running_service(Path(folder), num_threads=num_threads) as service:
            memory = service.rss_bytes()
    request_s = max(few_short - _FEW_TOKENS * few, 0.0)
    layer_s = max((many - few) / (_MANY_LAYERS - _FEW_LAYERS), 1e-6)
    return EngineTimes(
        max(few - _FEW_LAYERS * layer_s, 1e-6),
        layer_s,
        max((together - few) / (_AT_ONCE - 1), 0.0),
        request_s,
        max((together_short - _FEW_TOKENS * together - request_s) / (_AT_ONCE - 1), 0.0),
        memory,
    )


def generation_call(name: str, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], num_tokens: int) -> InferCall:
    """A request for exactly ``num_tokens`` tokens after a prompt."""
    call = call_of(name, {"input_ids": prompt}, {"max_tokens": num_tokens, "temperature": "0"})
    call.parameters = {**call.parameters, "ignore_eos": True}
    return call


def _token_s(service: ModelService, name: str, num_at_once: int) -> tuple[float, float]:
    """CPU seconds of a step, and of a whole short request."""
    prompt = np.arange(1, 5, dtype=np.int32)
    short, long = (
        service.answered(generation_call(name, prompt, number), num_at_once=num_at_once).cpu_s
        for number in (_FEW_TOKENS, _MANY_TOKENS)
    )
    return (long - short) / (_MANY_TOKENS - _FEW_TOKENS), short


def _write(folder: Path, backend: str, size: int, num_threads: int) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        _CONFIG.format(backend=backend, dims=size, threads=_THREADS[backend], num_threads=num_threads)
    )
    if backend == "onnxruntime":
        (folder / "1" / "model.onnx").write_bytes(several(("batch", size), 1))
        return
    import torch  # noqa: PLC0415  # an extra

    class Negation(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x_out": -x}

    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Negation(), (torch.ones(2, size),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, folder / "1" / "model.pt2")


def _write_llm(folder: Path, num_layers: int, num_threads: int) -> None:
    config: Mapping[str, object] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": num_layers, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "dtype": "float32",
    }  # fmt: skip
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "config.json").write_text(json.dumps(config))
    (folder / "config.pbtxt").write_text(_LLM_CONFIG.format(num_threads=num_threads))
