"""Bodies: whose are read, how many bytes are in work, and where large ones are parsed."""

import asyncio
import contextlib
import os
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from packaging.requirements import Requirement
from starlette.datastructures import Headers
from tests.case_files import table
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.base.errors import RemoteError, ResourceExhaustedError
from weft.gateway.errors import RequestError
from weft.gateway.http.request_context import RequestContext, RequestTracker
from weft.gateway.http.resources import CACHE_TTL_S, BytesInWork, Limits, Resources, read_body
from weft.gateway.json_text import MAX_INLINE_BYTES, MAX_INLINE_VALUES, is_large
from weft.gateway.main import Gateway
from weft.gateway.offload import FairSlots, Offload
from weft.gateway.openai.endpoint import Models
from weft_protos.grpc_service_pb2 import ModelMetadataResponse

WAIT_S = 60.0
IDENTITY = (("authorization", "Bearer a.b"),)


class Router:
    """Knows one key, and counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def call(self, method: str, request: Any, *, timeout_s: float, metadata: Any) -> ModelMetadataResponse:
        self.num_asked += 1
        if metadata != IDENTITY:
            raise RemoteError("UNAUTHENTICATED", "the key is not valid")
        return ModelMetadataResponse()


async def call(app: Any, path: str, headers: list[str], parts: list[str]) -> tuple[int, int, str]:
    """Status of the response to a POST, how many parts of the body were read, and what it says."""
    sent: list[Any] = []
    rest = [part.encode() for part in parts]

    async def receive() -> dict[str, Any]:
        if not rest:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": rest.pop(0), "more_body": bool(rest)}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [header.split(":", 1) if header != "key" else IDENTITY[0] for header in headers]
    raw = [(name.encode(), value.encode()) for name, value in pairs]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), WAIT_S)
    return sent[0]["status"], len(parts) - len(rest), sent[1]["body"].decode()


@contextlib.contextmanager
def app_of(router: Router, **limits: int) -> Iterator[RequestTracker]:
    """A gateway of this machine, which a proxy calls by its name."""
    given = {"max_body_bytes": 1000, "max_json_bytes": 1000, "max_bytes_in_work": 1000} | limits
    resources = Resources(router, Limits(**given, timeout_s=1.0))  # type: ignore[arg-type]
    gateway = Gateway(resources, Models(router, {}))  # type: ignore[arg-type]
    yield RequestTracker(gateway.app(), gateway.endpoint_of, (), ["proxy.example"])
    resources.close()


@pytest.mark.parametrize(("kind", "text", "answer"), table(Path(__file__).with_name("requests.txt")))
async def test_what_is_answered_before_a_model_is_asked(kind: str, text: str, answer: str) -> None:
    """Keys, origins, hosts and sizes are checked before the body is read."""
    router = Router()
    head, parts = text.split(" | ")
    path, *headers = head.split()
    if kind != "hosts":
        headers.append("host:localhost")
    with app_of(router) as app:
        status, num_read, text = await call(app, path, headers, parts.split())
    *expected, words = [*answer.split(" ", 3), ""][:4]
    assert expected == [str(status), str(num_read), str(router.num_asked)]
    assert words in text


async def test_a_valid_key_is_asked_for_once_in_two_seconds() -> None:
    """An invalid one each time, and never taken for valid."""
    now_s, router = [0.0], Router()
    limits = Limits(1000, 1000, 1000, 1.0)
    keys = Resources(router, limits, clock_s=lambda: now_s[0])  # type: ignore[arg-type]
    for _ in range(3):
        await keys.check_key(IDENTITY)
    assert 1 == router.num_asked
    now_s[0] = CACHE_TTL_S
    await keys.check_key(IDENTITY)
    assert 2 == router.num_asked
    for _ in range(2):
        with pytest.raises(RemoteError, match="not valid"):
            await keys.check_key(())
    assert 4 == router.num_asked


def test_bytes_in_work_are_bounded_over_all_bodies() -> None:
    """Those that came and those that are declared; memory goes back at the end."""
    given_back: list[int] = []
    in_work = BytesInWork(8 << 20, 8 << 20, lambda: given_back.append(1))
    in_work.add((), 5 << 20)
    with pytest.raises(ResourceExhaustedError, match=r"9437184 bytes with this one; at most 8388608") as caught:
        in_work.add((), 0, further_bytes=4 << 20)
    assert 1000 == caught.value.retry_after_ms
    in_work.add((), 3 << 20)
    with pytest.raises(ResourceExhaustedError):
        in_work.add((), 1)
    in_work.remove((), 3 << 20)
    assert not given_back
    in_work.remove((), 5 << 20)
    assert ([1], 0) == (given_back, in_work.num_bytes)
    in_work.add((), 1)
    in_work.remove((), 1)
    assert [1] == given_back


def test_a_key_has_half_of_the_bytes_in_work_that_others_leave() -> None:
    """So another key finds room beside it, and a third beside both; a whole body it may have in any case."""
    first, second = ((("authorization", f"Bearer {name}"),) for name in "ab")
    in_work = BytesInWork(100, 30, lambda: None)
    in_work.add(first, 50)
    with pytest.raises(ResourceExhaustedError, match=r"of this key in work would have 51 bytes .* at most 50"):
        in_work.add(first, 1)
    in_work.add(second, 30)
    with pytest.raises(ResourceExhaustedError, match="31 bytes with this one; at most 30"):
        in_work.add(second, 0, further_bytes=1)
    in_work.remove(first, 50)
    in_work.add(second, 20)
    in_work.remove(second, 50)
    in_work.add((), 100)


async def test_large_work_of_clients_goes_in_turn() -> None:
    """One that asks for much waits behind one that asks once; who gives up takes no turn."""
    slots, order = FairSlots(1), list[str]()

    async def work(client: str) -> None:
        await slots.take(client)
        order.append(client)
        slots.give_back()

    await slots.take("a")
    waiting = [asyncio.create_task(work(client)) for client in ("a", "a", "a", "b", "c", "c")]
    await asyncio.sleep(0)
    waiting.pop(4).cancel()
    slots.give_back()
    await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
    assert ["a", "b", "c", "a", "a"] == order
    await asyncio.wait_for(slots.take("d"), WAIT_S)


async def test_the_bytes_of_a_body_are_in_work_until_its_request_ends() -> None:
    """Also those of a body that became too large."""

    async def parts() -> AsyncIterator[bytes]:
        yield bytes(10)
        yield bytes(10)

    in_work = BytesInWork(100, 100, lambda: None)
    request: Any = SimpleNamespace(headers=Headers(), stream=parts)
    context = RequestContext("/x", Headers(), ())
    assert [bytes(10)] * 2 == await read_body(request, context, in_work, 20)
    assert 20 == in_work.num_bytes
    context.at_end.close()
    assert 0 == in_work.num_bytes
    with pytest.raises(RequestError, match="more than 15 bytes"):
        await read_body(request, context, in_work, 15)
    context.at_end.close()
    assert 0 == in_work.num_bytes


async def test_a_request_over_the_bytes_in_work_is_refused_with_429() -> None:
    """Before its body is read, if its size is declared."""
    headers = ["content-type:application/json", "content-length:11", "key", "host:localhost"]
    with app_of(Router(), max_bytes_in_work=10) as app:
        assert (429, 0) == (await call(app, "/v1/completions", headers, ["x" * 11]))[:2]


def test_what_takes_long_to_parse_is_large() -> None:
    """By bytes or by values; a long text is not."""
    assert not is_large(b'{"prompt": "' + b"word " * 100_000 + b'"}')
    assert is_large(bytes(MAX_INLINE_BYTES + 1))
    assert is_large(b"[" + b"1," * MAX_INLINE_VALUES + b"1]")
    assert is_large(b"{}," * (MAX_INLINE_VALUES // 2 + 1))


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    offload = Offload()
    yield offload
    offload.close()


def wait_for_file(path: str) -> int:
    """Returns the process id when the file exists."""
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


def wait_for_end(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def die() -> None:
    os._exit(1)


def refuse() -> None:
    raise RequestError("wrong", param="prompt", code="c", http_status=413)


async def test_large_work_runs_in_another_process(offload: Offload, tmp_path: Path) -> None:
    """The event loop goes on meanwhile; what is waited for no more gives its place back."""
    path = tmp_path / "go"
    running = [asyncio.ensure_future(offload.run(IDENTITY, wait_for_file, str(path))) for _ in range(4)]
    await asyncio.sleep(0)
    running.pop().cancel()
    path.touch()  # on the loop that would be blocked
    pids = await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
    assert os.getpid() not in pids


async def test_errors_come_back_whole_and_a_dead_process_is_replaced(offload: Offload) -> None:
    """With their fields; a process that dies fails its own request alone."""
    with pytest.raises(RequestError, match="wrong") as caught:
        await asyncio.wait_for(offload.run(IDENTITY, refuse), WAIT_S)
    assert ("prompt", "c", 413) == (caught.value.param, caught.value.reason, caught.value.http_status)
    with pytest.raises(ResourceExhaustedError, match="more memory"):
        await asyncio.wait_for(offload.run(IDENTITY, die), WAIT_S)
    assert os.getpid() != await asyncio.wait_for(offload.run(IDENTITY, os.getpid), WAIT_S)


async def test_processes_end_when_they_have_no_work() -> None:
    """And start again with the next."""
    offload = Offload(idle_s=0.01)
    first = await asyncio.wait_for(offload.run(IDENTITY, os.getpid), WAIT_S)
    await asyncio.wait_for(asyncio.to_thread(wait_for_end, first), WAIT_S)
    assert first != await asyncio.wait_for(offload.run(IDENTITY, os.getpid), WAIT_S)
    offload.close()


def test_uvicorn_is_in_the_range_whose_internals_are_known() -> None:
    """The range has an end, the installed version is in it, and it has what is overridden."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    pinned = [Requirement(text) for text in project["dependencies"] if text.startswith("uvicorn")]
    assert any(part.operator == "<" for part in pinned[0].specifier)
    assert pinned[0].specifier.contains(metadata.version("uvicorn"))
    overridden = ("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "shutdown")
    assert all(callable(getattr(H11Protocol, name)) for name in overridden)
    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)  # type: ignore[arg-type,return-value]
    config.load()
    server = uvicorn.Server(config)
    assert callable(server.capture_signals)
    assert isinstance(server.started, bool)
    loop = asyncio.new_event_loop()
    try:
        protocol = H11Protocol(config=config, server_state=server.server_state, app_state={}, _loop=loop)
        assert isinstance(protocol.conn, h11.Connection)
        assert protocol.cycle is None
        assert protocol.loop is loop
    finally:
        loop.close()
