"""Recordings of a router over gRPC: what is kept, what is left out, when they end, and that requests never notice."""

import asyncio
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tests.unit.router import make
from tests.unit.router.fake_target import failing
from tests.unit.router.stream_targets import counting, stream_target

from weft.base.core import InferCall
from weft.base.errors import PermissionDeniedError, WeftError
from weft.base.security.access import CALLER, Principal
from weft.base.security.keys import Grant
from weft.base.tensors import bytes_tensor
from weft.router import recording
from weft.router.feedback import GraphServicer
from weft.router.recording import RecordingLimits
from weft.router.repository.config import config_of_signature
from weft.router.target import TargetModel
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.recording import call_of_record, read_recording, results_of_record
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos import graph_service_pb2 as pb
from weft_protos import recording_pb2
from weft_protos.graph_service_pb2_grpc import GraphServiceStub

MIB = 1 << 20
PLAIN = """name: "pipe" platform: "graph"
input  [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "WHO" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
node { name: "root" sequence { step { name: "a" model_name: "a" } } }
"""
STREAM = """name: "talk" platform: "graph"
input  [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
node { name: "root" sequence { step { name: "s" model_name: "s" } } }
"""


class Served:
    """A router behind gRPC that may record."""

    def __init__(self, core: Any, target: Any, client: V2Client, stub: Any, folder: Path) -> None:
        self.core, self.target, self.client, self.stub, self.folder = core, target, client, stub, folder

    async def ask(self, number: float = 1, who: bytes = b"me", **more: Any) -> str:
        """Status of a request."""
        inputs = more.pop("inputs", {"IN": make.tensor(number), "WHO": bytes_tensor([who], (1,))})
        call = InferCall("pipe", "", f"r{number:g}", more.pop("parameters", {}), inputs)
        try:
            await self.client.infer(call, timeout_s=30, **more)
        except WeftError as error:
            return error.code
        return "OK"

    async def record(self, action: str, graph: str = "pipe", **more: Any) -> pb.RecordingStatus:
        response = await self.stub.Recording(pb.RecordingRequest(action=action, graph=graph, **more))  # type: ignore[arg-type]
        return response.recording[0] if response.recording else pb.RecordingStatus()

    async def refusal(self, action: str = "START", **more: Any) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.record(action, **more)
        return caught.value.code().name, caught.value.details()

    async def records(self, graph: str = "pipe") -> list[recording_pb2.Record]:
        """What the recording has, which ends."""
        status = await self.record("STOP", graph)
        return records_of(status)

    async def until(self, claim: Callable[[pb.RecordingStatus], bool]) -> pb.RecordingStatus:
        while not claim(status := await self.record("STATUS")):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        return status

    async def until_idle(self) -> None:
        while self.target.num_open:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


def size_of(status: pb.RecordingStatus) -> int:
    return Path(status.file[0]).stat().st_size


def records_of(status: pb.RecordingStatus) -> list[recording_pb2.Record]:
    return [one.record for one in read_recording(Path(status.file[0])) if one.HasField("record")]


@asynccontextmanager
async def served(root: Path, **options: Any) -> AsyncIterator[Served]:
    target = stream_target()
    target.streams["s"] = counting(3)
    signatures = [replace(make.signature(name), is_decoupled=name == "s") for name in ("a", "s")]
    target.models = [TargetModel(one, True, config_of_signature(one)) for one in signatures]
    make.write(root / "graphs", PLAIN)
    make.write(root / "graphs", STREAM, "talk")
    folder = root / "recordings"
    options.setdefault("recording", RecordingLimits(folder, 100 * MIB, 600.0))
    async with make.started(root / "graphs", target, model_control="explicit", load_graphs=["*"], **options) as s:
        server = make_server()
        add_services(server, s.core, "weft.router", s.core.extension())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        try:
            async with V2Client(address) as client, grpc.aio.insecure_channel(address) as channel:
                yield Served(s.core, target, client, GraphServiceStub(channel), folder)
        finally:
            await server.stop(None)


async def test_requests_are_kept_as_they_came(tmp_path: Path) -> None:
    """Inputs, parameters, headers, id, answer, path, status and times; errors too; no key and no hop's header."""
    async with served(tmp_path) as s:
        assert (await s.record("START", percent=100)).is_running
        secrets = ("authorization", "x-api-key", "cookie")
        metadata = (("x-user", "u1"), *((name, "SECRET") for name in secrets))
        assert "OK" == await s.ask(1, metadata=metadata, parameters={"priority": 1, "team": "x"})
        s.target.answers["a"] = failing("NOT_FOUND", "no such thing")
        assert "NOT_FOUND" == await s.ask(2)
        first, second = await s.records()
        call = call_of_record(first)
        assert ("pipe", "r1", {"priority": 1, "team": "x"}) == (call.model_name, call.request_id, call.parameters)
        assert make.tensor(1) == call.inputs["IN"]
        assert [make.tensor(1)] == [one.outputs["OUT"] for one in results_of_record(first)]
        assert ("root.a", "1", "", "u1") == (first.path, first.version, first.status, first.header["x-user"])
        assert first.duration_ns > first.response[0].offset_ns > 0
        assert 0 < first.timeout_ns <= 30e9
        assert ("NOT_FOUND", "root.a!") == (second.status, second.path)
        assert "no such thing" in second.message
        assert {"x-user", "user-agent"} >= {*first.header}
        file = next(s.folder.iterdir())
        assert (0o700, 0o600) == (s.folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777)
        assert b"SECRET" not in b"".join(one.SerializeToString() for one in read_recording(file))


async def test_streams_are_kept_also_those_that_are_left(tmp_path: Path) -> None:
    """All responses with their times; of a stream that its client leaves those that came, and CANCELLED."""
    call = InferCall("talk", "", "r", {}, {"IN": make.tensor(0)})
    async with served(tmp_path) as s:
        await s.record("START", "talk", percent=100)
        assert 3 == len([one async for one in s.client.stream(call, timeout_s=30) if not one.is_null])
        s.target.streams["s"] = counting(10**9)
        answers = s.client.stream(call, timeout_s=None)
        await anext(answers)
        await answers.aclose()
        await s.until_idle()
        first, second = await s.records("talk")
        assert [make.tensor(1), make.tensor(2), make.tensor(3)] == [
            one.outputs["OUT"] for one in results_of_record(first)
        ]
        offsets = [one.offset_ns for one in first.response]
        assert sorted(offsets) == offsets
        assert (True, "", True, "CANCELLED") == (first.is_stream, first.status, second.is_stream, second.status)
        assert len(second.response) >= 1
        assert "root.s~" == second.path


async def test_a_cancelled_request_is_kept(tmp_path: Path) -> None:
    """As CANCELLED, with the path as far as it came."""
    held = asyncio.Event()

    async def wait(call: Any, context: Any) -> Any:
        held.set()
        await asyncio.Event().wait()

    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        s.target.answers["a"] = wait
        asking = asyncio.create_task(s.ask(1))
        await held.wait()
        asking.cancel()
        await s.until_idle()
        (record,) = await s.records()
        assert ("CANCELLED", "root.a~", 0) == (record.status, record.path, len(record.response))


async def test_names_are_left_out_or_hashed(tmp_path: Path) -> None:
    """Tensors, headers and parameters, of requests and answers; equal values stay equal within a recording."""
    header = (("x-user", "secret"), ("x-mail", "secret"))
    async with served(tmp_path) as s:
        found = []
        for _ in range(2):
            await s.record("START", percent=100, omit=["X-Mail", "OUT", "note"], hash=["WHO", "x-user", "IN"])
            for number, who in ((1, b"secret"), (1, b"secret"), (2, b"other")):
                await s.ask(number, who, metadata=header, parameters={"note": "secret"})
            s.target.answers["a"] = failing("NOT_FOUND", "secret")
            assert "NOT_FOUND" == await s.ask(3, b"secret")
            s.target.answers.clear()
            records = await s.records()
            assert not [one for one in records if b"secret" in one.SerializeToString()]
            calls = [call_of_record(one) for one in records]
            assert calls[0].inputs == calls[1].inputs != calls[2].inputs
            assert ("BYTES", (1,)) == calls[0].inputs["WHO"][:2] == calls[0].inputs["IN"][:2]
            assert ["IN", "WHO", "note"] == [*records[0].withheld]
            assert ["x-user"] == [name for name in records[0].header if name.startswith("x-")]
            assert ({}, {}) == (results_of_record(records[0])[0].outputs, calls[0].parameters)
            found.append(calls[0].inputs["WHO"].data)
        assert found[0] != found[1]


async def test_a_share_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal requests too: each is drawn by itself."""
    draws = iter([0.0, 0.2, 0.2999, 0.3, 0.99])
    monkeypatch.setattr("weft.router.recording.random.random", lambda: next(draws))
    async with served(tmp_path) as s:
        await s.record("START", percent=30)
        for _ in range(5):
            await s.ask(1)
        assert 3 == len(await s.records())


async def test_limits_end_a_recording(tmp_path: Path) -> None:
    """By size the file is never longer; by time; a new one may then begin. Requests go on."""
    async with served(tmp_path) as s:
        await s.record("START", percent=100, max_bytes=64 << 10)
        number = 0
        while s.core._recordings.active:
            noise = bytes(hash((number, i)) & 0xFF for i in range(2000))
            number += 1
            assert "OK" == await s.ask(number, noise)
        status = await s.record("STATUS")
        assert "its file is as large as it may be" == status.end_reason
        assert (64 << 10) >= size_of(status) == status.num_bytes > 30_000
        assert status.num_requests == len(records_of(status)) > 10
        await s.record("START", percent=100, max_s=0.05)
        status = await s.until(lambda one: not one.is_running)
        assert "its time is over" == status.end_reason
        assert 2 == len(list(s.folder.iterdir()))


async def test_a_full_disk_ends_the_recording_alone(tmp_path: Path) -> None:
    """The requests are answered; the reason is told; what was written before can be read."""
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        assert "OK" == await s.ask(1)
        size = (await s.until(lambda one: one.num_requests == 1)).num_bytes
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        try:
            assert "OK" == await s.ask(2)
            status = await s.until(lambda one: not one.is_running)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "writing failed: File too large" == status.end_reason
        assert ["r1"] == [one.request.id for one in records_of(status)]
        assert "OK" == await s.ask(3)


async def test_what_finds_no_room_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is too slow costs records, never time; memory stays bounded. The metrics have the counts."""
    monkeypatch.setattr(recording, "MAX_HELD_BYTES", 10_000)
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        assert ["OK"] * 3 == [await s.ask(1), await s.ask(2, b"x" * 9000), await s.ask(3)]
        status = await s.record("STOP")
        assert (2, 1) == (status.num_requests, status.num_dropped)
        registry = CollectorRegistry()
        registry.register(s.core._recordings)
        names = [f"weft_recording_{what}_total" for what in ("requests", "dropped", "bytes")]
        values = [registry.get_sample_value(name, {"graph": "pipe"}) for name in names]
        assert [2, 1, size_of(status)] == values


async def test_what_validation_rejects_is_recorded(tmp_path: Path) -> None:
    """With its error, as where a graph streams; its memory is free again."""
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        assert "INVALID_ARGUMENT" == await s.ask(1, inputs={})
        (record,) = await s.records()
        assert ("INVALID_ARGUMENT", True) == (record.status, "expected 2 inputs" in record.message)
        assert 0 == s.core._recordings._latest["pipe"].num_held_bytes


async def test_an_end_goes_on_without_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves its STOP ends the recording all the same; what is answered later is dropped."""
    writing, going_on, write = asyncio.Event(), threading.Event(), recording.Recorder._write
    loop = asyncio.get_running_loop()

    def wait(*arguments: Any) -> int:
        loop.call_soon_threadsafe(writing.set)
        going_on.wait()
        return write(*arguments)

    monkeypatch.setattr(recording.Recorder, "_write", wait)
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        await s.ask(1)
        stop = pb.RecordingRequest(action=pb.RecordingRequest.STOP, graph="pipe")
        stopping = asyncio.create_task(s.core._recordings.answer(stop, b""))
        await writing.wait()
        await s.ask(2)
        stopping.cancel()
        await asyncio.wait([stopping])
        going_on.set()
        status = await s.until(lambda one: not one.is_running)
        assert ("stopped", 1, 1) == (status.end_reason, status.num_requests, status.num_dropped)


async def test_a_recording_goes_on_over_a_reload(tmp_path: Path) -> None:
    """The graph's new version answers, and is recorded in the same file."""
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        await s.ask(1)
        make.write(tmp_path / "graphs", PLAIN.replace('name: "a" model', 'name: "b" model'), version="2")
        await s.client.load("pipe", {}, timeout_s=30)
        await s.ask(2)
        assert [("1", "root.a"), ("2", "root.b")] == [(one.version, one.path) for one in await s.records()]


async def test_what_cannot_be_recorded_is_told(tmp_path: Path) -> None:
    """Without a folder; with limits that are not allowed; twice; unknown graphs."""
    async with served(tmp_path / "off", recording=RecordingLimits()) as s:
        assert ("FAILED_PRECONDITION", "this router was started without --record-dir, the folder for recordings") == (
            await s.refusal(percent=5)
        )
        assert s.core._recordings.active is None
    async with served(tmp_path) as s:
        assert ("INVALID_ARGUMENT", "a recording's percent must be 0.001 to 100, got 0") == await s.refusal()
        assert "INVALID_ARGUMENT" == (await s.refusal(percent=float("nan")))[0]
        assert "max_s must be 0.001 to 600, got 601" in (await s.refusal(percent=1, max_s=601))[1]
        assert "max_bytes must be 65536 to" in (await s.refusal(percent=1, max_bytes=1))[1]
        assert "NOT_FOUND" == (await s.refusal(graph="nobody", percent=1))[0]
        assert "NOT_FOUND" == (await s.refusal("STOP"))[0]
        await s.record("START", percent=1)
        assert "ALREADY_EXISTS" == (await s.refusal(percent=1))[0]
        assert "NOT_FOUND" == (await s.refusal("STOP", graph=""))[0]
        assert "stopped" == (await s.record("STOP")).end_reason
    taken = tmp_path / "taken"
    taken.write_text("")
    async with served(tmp_path / "b", recording=RecordingLimits(taken / "in")) as s:
        assert "UNAVAILABLE" == (await s.refusal(percent=1))[0]


async def test_who_may_not_use_a_graph_does_not_see_its_recording(tmp_path: Path) -> None:
    """Of all recordings a key sees those of its graphs, and starts and ends no other."""
    grant = Grant("team", models=("talk",), control=True)
    async with served(tmp_path) as s:
        await s.record("START", percent=1)
        await s.record("START", "talk", percent=1)
        servicer = s.core.graph_service()
        CALLER.set(Principal(grant, Counter(), lambda: 0.0, lambda: None))
        every = await servicer.Recording(pb.RecordingRequest(), None)
        assert ["talk"] == [one.graph for one in every.recording]
        for action in (pb.RecordingRequest.START, pb.RecordingRequest.STOP):
            with pytest.raises(PermissionDeniedError):
                await GraphServicer.Recording.__wrapped__(  # type: ignore[attr-defined]  # under ``answering``
                    servicer, pb.RecordingRequest(action=action, graph="pipe", percent=1), None
                )


async def test_the_end_of_the_router_ends_its_recordings(tmp_path: Path) -> None:
    """All that was answered is in the file."""
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        await s.ask(1)
    (file,) = (tmp_path / "recordings").iterdir()
    assert ["header", "record", "end"] == [one.WhichOneof("entry") for one in read_recording(file)]


async def test_much_is_written_soon_though_there_was_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come at once after a calm have the room of half a second, not that of two."""
    monkeypatch.setattr(recording, "_FRAME_S", 1e9)
    monkeypatch.setattr(recording, "_MANY_BYTES", 5000)
    async with served(tmp_path) as s:
        await s.record("START", percent=100)
        assert "OK" == await s.ask(1)
        await s.until(lambda one: one.num_requests == 1)
        assert "OK" == await s.ask(2, b"x" * 9000)
        await s.until(lambda one: one.num_requests == 2)
