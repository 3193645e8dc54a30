"""Large bodies before a gateway process: others are answered beside them, and their memory is given back."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from tests.integration.routing import naming_service, running_router
from tests.integration.talking import GatewayProcess, TalkerCore, running_gateway

from weft.base.security.keys import new_key

WAIT_S = 60.0
NUM_BODIES = 6
#: A long text, and floats with names, which cost most to parse.
BODY = b'{"model": "talker", "prompt": ["' + b"a" * 11_000_000 + b'",' + b'{"a":1.5},' * 300_000 + b"1]}"


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def until_below(pid: int, mib: float) -> None:
    """The process has no more memory than that, soon."""
    end_s = time.monotonic() + WAIT_S
    while resident_mib(pid) > mib and time.monotonic() < end_s:
        time.sleep(0.1)
    assert resident_mib(pid) <= mib


async def connected(
    address: str, num_bytes: int, key: str = "none"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the headers of a request were sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ("POST /v1/completions HTTP/1.1", f"host: {address}", f"authorization: Bearer {key}")
    lines += ("content-type: application/json", f"content-length: {num_bytes}", "", "")
    writer.write("\r\n".join(lines).encode())
    return reader, writer


async def post(address: str, key: str = "none") -> int:
    """Status of the response to the body."""
    reader, writer = await connected(address, len(BODY), key)
    writer.write(BODY)
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
        until_below(gateway.process.pid, before_mib + 48)


@pytest.fixture
def two_tenants(tmp_path: Path) -> Iterator[tuple[GatewayProcess, str, str]]:
    """A gateway before a router that knows two keys, and the keys."""
    (one, first), (other, second) = new_key("one"), new_key("other")
    keys = tmp_path / "weft.keys"
    keys.write_text(f"{first}\n{second}\n")
    (tmp_path / "graphs").mkdir()
    with (
        naming_service(TalkerCore()) as served,
        running_router(tmp_path / "graphs", served, ["--auth-keys", str(keys)]) as router,
        running_gateway(router.grpc, "--watchdog-abort-s", "20") as gateway,
    ):
        yield gateway, one, other


@contextlib.asynccontextmanager
async def neighbour(gateway: GatewayProcess, key: str, prompt: str) -> AsyncIterator[list[float]]:
    """Another client calls meanwhile, one call after another; how long each took in seconds, and every one succeeds."""
    took_s: list[float] = []

    async def call() -> None:
        begin_s = time.monotonic()
        answer = await client.completions.create(model="talker", prompt=prompt, max_tokens=1)
        assert answer.choices[0].text
        took_s.append(time.monotonic() - begin_s)

    async def go_on() -> None:
        while not is_over.is_set():
            await call()

    is_over = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=WAIT_S) as client:
        await call()
        took_s.clear()
        calling = asyncio.create_task(go_on())
        try:
            yield took_s
        finally:
            is_over.set()
            await calling


def p99(took_s: list[float]) -> float:
    """The 99th percentile, in seconds."""
    return statistics.quantiles(took_s, n=100, method="inclusive")[98] if len(took_s) > 1 else took_s[0]


@pytest.mark.long
async def test_bodies_of_15_mb_of_one_key_hold_up_no_call_of_another(
    two_tenants: tuple[GatewayProcess, str, str],
) -> None:
    """Sixteen at once, and calls whose prompt of 9000 commas is parsed where they are: each waits for two of them."""
    gateway, one, other = two_tenants
    begin_s = time.monotonic()
    async with neighbour(gateway, other, "a" + "," * 9000) as took_s:
        statuses = await asyncio.gather(*(post(gateway.address, one) for _ in range(16)))
    assert set(statuses) <= {400, 429}
    attack_s = time.monotonic() - begin_s
    assert statuses.count(400) >= 4
    print(f"p99 {p99(took_s):.2f} s of {len(took_s)} calls beside {statuses.count(400)} bodies in {attack_s:.2f} s")
    assert p99(took_s) < attack_s / 2, took_s


@pytest.mark.long
async def test_bodies_without_a_key_are_cut_off(
    two_tenants: tuple[GatewayProcess, str, str],
) -> None:
    """Sixteen clients send what they can for three seconds: each is answered 401, and closed after a bound."""
    gateway, _, other = two_tenants
    num_bytes, num_refused, end_s = 0, 0, time.monotonic() + 3.0

    async def flood() -> None:
        nonlocal num_bytes, num_refused
        while time.monotonic() < end_s:
            reader, writer = await connected(gateway.address, 1 << 40)
            with contextlib.suppress(ConnectionError):
                assert b" 401 " in await reader.readline()
                num_refused += 1
                sent = 0
                while sent < 256 << 20:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    sent += 1 << 16
            num_bytes += sent
            writer.close()

    async with neighbour(gateway, other, "a") as took_s:
        await asyncio.gather(*(flood() for _ in range(16)))
    assert num_refused >= 16
    assert num_bytes / num_refused < 32 << 20  # what the system buffers counts too
    print(f"p99 {p99(took_s):.2f} s of {len(took_s)} calls beside {num_bytes >> 20} MiB on {num_refused} connections")
    assert p99(took_s) < 3.0, took_s
