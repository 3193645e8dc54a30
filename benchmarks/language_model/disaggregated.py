"""``python -m benchmarks.language_model.disaggregated``: prefill apart from decode, over processes on one machine.

First: times between tokens of streams while long prompts arrive, with two replicas that do both, in chunks, and with
one that computes prompts and one that decodes; each replica has a core. Then: bytes a second of transfers, from the
question to the last block in the other cache, over shared memory, a Unix socket and TCP.
"""

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.language_model.shapes import MAX_MODEL_LEN, SHAPES, WEIGHTS_SEED, hugging_face_config
from weft.base.core import InferCall, RequestedOutput
from weft.base.tensors import encode
from weft.v2.client.v2_client import V2Client

_MODEL = "benchmark"
_NUM_DECODERS, _PROMPT_LEN, _LONG_LEN = 8, 32, 1500
_CHUNKS = {"chunks of 128": 128, "chunks of 64": 64}


class Service(NamedTuple):
    """A process, its address and that of its metrics."""

    process: "subprocess.Popen[str]"
    address: str
    metrics: str

    def total(self, name: str) -> float:
        """The sum of the samples of a metric."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as response:  # http
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@contextmanager
def service(core: int, *arguments: str, socket: Path | None = None) -> Iterator[Service]:
    """A process on a core."""
    own = ["--grpc-port", "0", "--metrics-port", "0", "--stop-with-stdin", "--log-level", "error"]
    own += [] if socket is None else ["--unix-socket", str(socket)]
    command = ["taskset", "-c", str(core), sys.executable, "-P", "-m", *arguments, *own]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = json.loads(process.stdout.readline() if process.stdout is not None else "")
            yield Service(process, told["grpc"] if socket is None else f"unix:{socket}", told["metrics"])
        finally:
            process.terminate()


@contextmanager
def mesh(
    shape: str, roles: Sequence[str], transport: str = "shared memory", **parameters: object
) -> Iterator[list[Service]]:
    """A router, and replicas with these roles, each on a core of its own."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = root / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(16))
        (root / "graphs").mkdir()
        replicas = []
        for number, role in enumerate(roles):
            folder = root / f"{number}" / _MODEL / "1"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(hugging_face_config(SHAPES[shape])))
            given = {
                "load_format": "dummy",
                "seed": WEIGHTS_SEED,
                "max_model_len": MAX_MODEL_LEN,
                "role": role,
            } | parameters
            spelled = "".join(
                f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in given.items()
            )
            (folder.parent / "config.pbtxt").write_text(f'backend: "llm"\n{spelled}')
            arguments = ("weft.services.model", "--repository", str(root / f"{number}"), "--mesh-key-file", str(key))
            socket = None if transport == "TCP" else root / f"{number}.sock"
            replicas.append(stack.enter_context(service(number, *arguments, socket=socket)))
            if transport == "Unix socket":  # without the one for shared memory
                Path(f"{socket}.tensors").unlink()
        target = f"model={','.join(replica.address for replica in replicas)}"
        arguments = ("weft.services.router", "--repository", str(root / "graphs"), "--mesh-key-file", str(key))
        router = stack.enter_context(service(0, *arguments, "--target", target))
        yield [router, *replicas]


async def tokens(client: V2Client, length: int, num_tokens: int, seed: int) -> AsyncIterator[float]:
    """Times of the tokens of one stream, in seconds."""
    prompt = np.random.default_rng(seed).integers(2, 100, length, np.int32)
    sampling = json.dumps({"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}).encode()
    inputs = {
        "input_ids": encode(prompt),
        "stream": encode(np.ones(1, np.bool_)),
        "sampling_parameters": encode(np.array([sampling], np.object_)),
    }
    call = InferCall(_MODEL, inputs=inputs, outputs=(RequestedOutput("output_ids", {}),))
    async for result in client.stream(call, timeout_s=300.0):
        if "output_ids" in result.outputs:
            yield time.perf_counter()


async def gaps(router: str, seconds: float, pause_s: float) -> tuple[list[float], list[float]]:
    """Milliseconds between tokens of the decoders, and to the first tokens of the long prompts that arrive."""
    found: list[float] = []
    firsts: list[float] = []
    async with V2Client(router) as client:

        async def decode(seed: int) -> None:
            last = 0.0
            while True:
                async for at in tokens(client, _PROMPT_LEN, 2000, seed):
                    found.append((at - last) * 1e3)
                    last = at

        async def prompt(seed: int) -> None:
            start = time.perf_counter()
            async for at in tokens(client, _LONG_LEN, 8, seed):
                firsts.append((at - start) * 1e3)
                start = -1e9

        decoders = [asyncio.create_task(decode(seed)) for seed in range(_NUM_DECODERS)]
        await asyncio.sleep(2.0)
        found.clear()
        prompts, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            prompts.append(asyncio.create_task(prompt(1000 + len(prompts))))
            await asyncio.sleep(pause_s)
        await asyncio.gather(*prompts)
        for task in decoders:
            task.cancel()
        await asyncio.gather(*decoders, return_exceptions=True)
    return found, [first for first in firsts if first < 1e6]


async def _transfers(router: str, count: int, length: int) -> None:
    async with V2Client(router) as client:
        for seed in range(count):
            async for _ in tokens(client, length, 2, 5000 + seed):
                pass


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.language_model.disaggregated", description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals, each way")
    parser.add_argument("--pause-s", type=float, default=1.5, help="between two long prompts")
    parser.add_argument("--transfers", type=int, default=8, help="each way")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {_NUM_DECODERS} streams, a prompt of {_LONG_LEN} tokens each {options.pause_s} s")
    print("| | between tokens p50 | p99 | longest, ms | tokens/s | first token of a long prompt p50, ms |")
    for name, chunk in _CHUNKS.items():
        for roles in (("both", "both"), ("prefill", "decode")):
            with mesh("toy", roles, max_num_batched_tokens=chunk, max_num_seqs=16) as (router, *_):
                found, firsts = asyncio.run(gaps(router.address, options.seconds, options.pause_s))
            p50, p99 = np.percentile(found, (50, 99))
            rate, first = len(found) / options.seconds, np.median(firsts)
            figures = f"{p50:.1f} | {p99:.1f} | {max(found):.0f} | {rate:.0f} | {first:.0f}"
            print(f"| {' + '.join(roles)}, {name} | {figures} |", flush=True)
    for transport in ("shared memory", "Unix socket", "TCP"):
        with mesh("mid", ("prefill", "decode"), transport, max_num_seqs=4) as (router, _, decode):
            asyncio.run(_transfers(router.address, 1 + options.transfers, 1024))
            seconds, num_bytes = (
                decode.total("weft_llm_kv_transfer_seconds_sum"),
                decode.total("weft_llm_kv_transfer_bytes_total"),
            )
            count = decode.total("weft_llm_kv_transfers_total")
        size = f"{count:.0f} transfers of {num_bytes / count / 1e6:.1f} MB"
        print(f"{transport}: {num_bytes / seconds / 1e9:.2f} GB/s, {size}", flush=True)


if __name__ == "__main__":
    main()
