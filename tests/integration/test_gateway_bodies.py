"""Large bodies before a gateway process: others are answered beside them, and their memory is given back."""

import asyncio
import time
from pathlib import Path

import openai
from tests.integration.routing import naming_service, running_router
from tests.integration.talking import TalkerCore, running_gateway
from tests.processes import wait_until

WAIT_S = 60.0
NUM_BODIES = 6
#: A long text, and floats with names, which cost most to parse.
BODY = b'{"model": "talker", "prompt": ["' + b"a" * 11_000_000 + b'",' + b'{"a":1.5},' * 300_000 + b"1]}"


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


async def post(address: str) -> int:
    """Status of the response to the body."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ("POST /v1/completions HTTP/1.1", f"host: {address}", "authorization: Bearer none")
    lines += ("content-type: application/json", f"content-length: {len(BODY)}", "", "")
    writer.write("\r\n".join(lines).encode() + BODY)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_a_stream_goes_on_beside_six_bodies_of_14_mb(tmp_path: Path) -> None:
    """Its words come while they are parsed; the gateway's memory is what it was."""
    core = TalkerCore()
    limit = str((NUM_BODIES + 1) * len(BODY))
    with (
        naming_service(core) as served,
        running_router(tmp_path, served) as router,
        running_gateway(
            router.grpc, "--max-bytes-in-work", limit, "--max-body-bytes", limit, "--watchdog-abort-s", "20"
        ) as gateway,
    ):
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
            await client.completions.create(model="talker", prompt="warm")
            before_mib = resident_mib(gateway.process.pid)
            posting = [asyncio.create_task(post(gateway.address)) for _ in range(NUM_BODIES)]
            num_beside = 0
            longest_s = 0.0
            while not all(task.done() for task in posting):
                begin_s = time.monotonic()
                async for _ in await client.completions.create(model="talker", prompt="a b c", stream=True):
                    num_beside += 1
                longest_s = max(longest_s, time.monotonic() - begin_s)
            assert [400] * NUM_BODIES == [task.result() for task in posting]
        assert num_beside >= NUM_BODIES, f"{num_beside} words came, the slowest three in {longest_s:.1f} s"
        most_mib = before_mib + 48
        await asyncio.to_thread(wait_until, lambda: resident_mib(gateway.process.pid) <= most_mib, "memory given back")
