"""``python -m benchmarks.language_model.balancing``: sessions with common system prompts over four replicas.

The policies of the router side by side: four model services, and a router for each policy over all of them. The same
trace goes through one router after another, in turn, each time under a salt of its own, so that no run finds blocks of
another. Sessions begin at random times; each waits for its answer, thinks, and sends all of the text so far with a new
message. The caches together hold about the trace; one of them holds a part.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np

from benchmarks import machine
from benchmarks.language_model.serving import stream_request, write_repository
from benchmarks.language_model.shapes import SHAPES, make_model
from benchmarks.language_model.sizes import FULL
from benchmarks.report import machine_lines, table
from benchmarks.service import running_model_service
from weft.router.targets.balancing import POLICIES

_MODEL = "benchmark"
_POLICIES = ("round_robin", "least_outstanding", "prefix")
_NUM_REPLICAS = 4
_NUM_SYSTEM_PROMPTS, _SYSTEM_LEN = 6, 384
_MESSAGE_LENS, _NUM_NEW, _NUM_TURNS = (24, 96), 16, 5
_STARTS_S, _THINK_S = 8.0, 1.0


class Answer(NamedTuple):
    """One turn: time to the first token, tokens of the prompt, and how many of them were cached."""

    ttft_s: float
    num_prompt: int
    num_cached: int


class Outcome(NamedTuple):
    """One run of the trace: its answers, calls by replica, CPU time of the model services and wall time."""

    answers: list[Answer]
    num_calls: list[float]
    cpu_s: float
    duration_s: float


@contextmanager
def running_router(folder: Path, addresses: str, policy: str) -> Iterator[tuple[str, str]]:
    """A router over the replicas; its addresses of calls and of metrics."""
    command = [
        sys.executable, "-P", "-m", "weft.services.router", "--repository", str(folder), "--target",
        f"model={addresses}", f"--target-policy=model={policy}", "--grpc-port", "0", "--metrics-port", "0",
        "--stop-with-stdin", "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            endpoints = json.loads(process.stdout.readline() if process.stdout is not None else "")
            yield endpoints["grpc"], endpoints["metrics"]
        finally:
            process.terminate()


async def run_trace(address: str, vocab_size: int, num_sessions: int, salt: str) -> list[Answer]:
    """Every session once. Raises tritonclient.utils.InferenceServerException: a request failed."""
    from tritonclient.grpc import aio  # noqa: PLC0415  # only this module needs it

    rng = np.random.default_rng(0)
    prompts = rng.integers(1, vocab_size, (_NUM_SYSTEM_PROMPTS, _SYSTEM_LEN)).astype(np.int32)
    shares = 1 / np.arange(1, _NUM_SYSTEM_PROMPTS + 1)
    answers: list[Answer] = []

    async def session(client: Any, seed: int) -> None:
        own = np.random.default_rng([1, seed])
        text = prompts[own.choice(_NUM_SYSTEM_PROMPTS, p=shares / shares.sum())]
        await asyncio.sleep(own.uniform(0, _STARTS_S))
        for _ in range(_NUM_TURNS):
            message = own.integers(1, vocab_size, own.integers(*_MESSAGE_LENS)).astype(np.int32)
            text = np.concatenate([text, message])
            start_s, ttft_s, num_cached = time.perf_counter(), 0.0, 0
            async for result, error in client.stream_infer(_request(text, salt)):
                if error is not None:
                    raise error
                ids = result.as_numpy("output_ids")
                if not ttft_s:
                    ttft_s = time.perf_counter() - start_s
                    num_cached = int(result.as_numpy("num_cached_tokens")[0])
                    num_prompt = len(text)
                text = np.concatenate([text, ids.reshape(-1)])
            answers.append(Answer(ttft_s, num_prompt, num_cached))
            await asyncio.sleep(own.exponential(_THINK_S))

    async with aio.InferenceServerClient(address) as client, asyncio.TaskGroup() as sessions:
        for seed in range(num_sessions):
            sessions.create_task(session(client, seed))
    return answers


async def _request(text: Any, salt: str) -> AsyncIterator[dict[str, Any]]:
    outputs = ("output_ids", "num_input_tokens", "num_cached_tokens")
    yield stream_request(text, _NUM_NEW, outputs, parameters={"cache_salt": salt})


def _counts(metrics: str) -> dict[str, float]:
    lines = urlopen(f"http://{metrics}/metrics", timeout=10).read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def _picks(metrics: str) -> Counter[str]:
    return Counter({key: value for key, value in _counts(metrics).items() if key.startswith("weft_endpoint_picks")})


def main() -> int:
    """Print one table: time to the first token, hit rate and balance of each policy; medians of the rounds."""
    parser = argparse.ArgumentParser(prog="benchmarks.language_model.balancing", description=__doc__)
    parser.add_argument("--shape", default="toy", choices=SHAPES)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=8192, help="of each replica")
    parser.add_argument("--policies", default=",".join(_POLICIES), help=f"some of {','.join(POLICIES)}")
    options = parser.parse_args()
    policies = options.policies.split(",")
    model = make_model(options.shape)
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "graphs").mkdir()
        write_repository(folder / "model", model, FULL)
        config = folder / "model" / _MODEL / "config.pbtxt"
        blocks = f'parameters {{ key: "num_blocks" value {{ string_value: "{options.kv_tokens // 8}" }} }}\n'
        config.write_text(config.read_text() + blocks)
        services = [stack.enter_context(running_model_service(folder / "model")) for _ in range(_NUM_REPLICAS)]
        addresses, pids = ",".join(one.grpc for one in services), {one.grpc: one.pid for one in services}
        routers = {
            policy: stack.enter_context(running_router(folder / "graphs", addresses, policy)) for policy in policies
        }
        for round_ in range(options.rounds):
            for policy, (address, metrics) in routers.items():
                before, before_s, start_s = _picks(metrics), machine.cpu_seconds(pids), time.perf_counter()
                answers = asyncio.run(
                    run_trace(address, model.shape.vocab_size, options.sessions, f"{policy} {round_}")
                )
                duration_s, after_s = time.perf_counter() - start_s, machine.cpu_seconds(pids)
                calls = list((_picks(metrics) - before).values())
                cpu_s = sum(after_s.values()) - sum(before_s.values())
                outcomes[policy].append(Outcome(answers, calls, cpu_s, duration_s))
        learnt = {key: value for key, value in _counts(routers[policies[-1]][1]).items() if "prefix_picks" in key}
    rows = [
        [policy, *(f"{np.median([read(run) for run in runs]):.3g}" for read in _COLUMNS.values())]
        for policy, runs in outcomes.items()
    ]
    print("\n".join([*machine_lines(machine.describe()), f"Model: {options.shape}, {options.sessions} sessions", ""]))
    print(table([["policy", *_COLUMNS], *rows], left_columns={0}))
    print(learnt)
    return 0


_COLUMNS: dict[str, Any] = {
    "TTFT p50, ms": lambda run: 1e3 * np.percentile([one.ttft_s for one in run.answers], 50),
    "p90, ms": lambda run: 1e3 * np.percentile([one.ttft_s for one in run.answers], 90),
    "prompt tokens cached, %": lambda run: (
        100 * sum(one.num_cached for one in run.answers) / sum(one.num_prompt for one in run.answers)
    ),
    "calls of the busiest replica / mean": lambda run: max(run.num_calls) * _NUM_REPLICAS / sum(run.num_calls),
    "CPU-s of the replicas": lambda run: run.cpu_s,
    "wall, s": lambda run: run.duration_s,
}

if __name__ == "__main__":
    sys.exit(main())
