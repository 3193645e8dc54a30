"""`weft infer` against a V2 server in a thread of its own."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from weft_cli.__main__ import main
from weft_common.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft_common.errors import NotFoundError, ResourceExhaustedError
from weft_common.server import add_services
from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import bytes_tensor, split_bytes

SIGNATURE = ModelSignature(
    "shout", "3", "graph", 8, (TensorSpec("TEXT", "BYTES", (1,)),), (TensorSpec("LOUD", "BYTES", (1,)),)
)


class _Shout(InferenceCore):
    """Answers in capitals, never with the parameter `hold`; keeps the last call."""

    def __init__(self) -> None:
        self.call: InferCall | None = None
        self.headers: Mapping[str, str] = {}
        self.remaining_ms = 0.0

    def signature(self, name: str, version: str) -> ModelSignature:
        if name != "shout":
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return SIGNATURE

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("shout", "3", "READY", "")]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.call, self.headers = call, context.headers
        assert context.deadline_ns is not None
        self.remaining_ms = (context.deadline_ns - context.arrival_ns) / 1e6
        if call.parameters.get("hold"):
            await asyncio.Event().wait()
        if call.parameters.get("full"):
            context.trailing_metadata.append(("x-graph-path", "root.up!"))
            raise ResourceExhaustedError("shout: queue is full: 8 requests of 8", retry_after_ms=5)
        texts = [text.upper() for text in split_bytes(call.inputs["TEXT"].data)]
        steps = [{"path": "root/up", "target": "model", "model": "upper", "version": "1", "ms": 0.5, "status": "OK"}]
        trace = str(call.parameters.get("trace_text", json.dumps(steps)))
        parameters = {"graph_trace": trace} if call.parameters.get("graph_trace") else {}
        context.trailing_metadata.append(("x-graph-path", "root.up"))
        return InferResult("shout", "3", "", parameters, {"LOUD": bytes_tensor(texts, call.inputs["TEXT"].shape)})


@pytest.fixture
def core() -> _Shout:
    """The model behind the server."""
    return _Shout()


@pytest.fixture
def url(core: _Shout) -> Iterator[str]:
    """Address of a running server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        add_services(server, core, "fake")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_the_answer_is_printed(url: str, core: _Shout, capsys: pytest.CaptureFixture[str]) -> None:
    """Text goes in, model, version, duration and outputs come out; parameters and deadline are sent."""
    arguments = ["--text", "hello", "--param", "team=care", "--param", "n=2", "--timeout-ms", "5000"]
    assert main(["infer", "shout", "--url", url, *arguments]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("shout version 3, ")
    assert second == 'LOUD  BYTES[1, 1]  [["HELLO"]]'
    assert core.call is not None
    assert core.call.parameters == {"team": "care", "n": 2}
    assert 4000 < core.remaining_ms < 5100  # gRPC rounds up to what its header can say


def test_a_version_can_be_asked_for(url: str, core: _Shout) -> None:
    """NAME/VERSION asks for that version."""
    assert main(["infer", "shout/3", "--url", url, "--text", "a"]) == 0
    assert core.call is not None
    assert core.call.model_version == "3"


def test_files_are_rows_of_a_batch(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of each file are one row."""
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    assert main(["infer", "shout", "--url", url, "--file", str(tmp_path / "a"), "--file", str(tmp_path / "b")]) == 0
    assert 'LOUD  BYTES[2, 1]  [["ONE"], ["TWO"]]' in capsys.readouterr().out


def test_a_file_may_name_its_input(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NAME=PATH; a file whose own name looks so is found all the same."""
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "TEXT=a").write_bytes(b"two")
    for path, answer in ((f"TEXT={tmp_path}/a", "ONE"), (f"{tmp_path}/TEXT=a", "TWO")):
        assert 0 == main(["infer", "shout", "--url", url, "--file", path])
        assert f'[["{answer}"]]' in capsys.readouterr().out


def test_headers_id_and_outputs_are_sent(url: str, core: _Shout, tmp_path: Path) -> None:
    """What sticky splitters, feedback and clients of single tensors use; names of headers go in lower case."""
    (tmp_path / "text.json").write_text('"hello"')
    given = ["--input", f"TEXT=@{tmp_path}/text.json", "--header", "X-User-Id=ann", "--request-id", "7f", "--output"]
    assert 0 == main(["infer", "shout", "--url", url, *given, "LOUD"])
    assert core.call is not None
    assert ("7f", ("LOUD",)) == (core.call.request_id, tuple(output.name for output in core.call.outputs))
    assert "ann" == core.headers["x-user-id"]
    assert [b"hello"] == split_bytes(core.call.inputs["TEXT"].data)


@pytest.mark.parametrize("header", ["x y=1", ":path=1", "key-bin=1", "x=é", "x=a\nb", "x", "=1"])
def test_a_header_that_cannot_be_sent_is_wrong_usage(header: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with a reason before anything is sent."""
    with pytest.raises(SystemExit, match="2"):
        main(["infer", "shout", "--text", "a", "--header", header])
    assert "argument --header: '" in capsys.readouterr().err


def test_the_trace_shows_path_and_steps(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --trace the path of the trailing metadata, the tree of the steps and the total follow the answer."""
    assert main(["infer", "shout", "--url", url, "--text", "a", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[:3] == ["path: root.up", "root", "└─ up       0.50 ms  upper@1 on model"]
    assert lines[3].startswith("total: 0.50 ms in the graph, ")
    assert not any("\x1b" in line for line in lines)


def test_a_server_without_traces_is_shown_all_the_same(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no trace leaves the tree out, not the answer."""
    arguments = ["--text", "a", "--trace", "--param", "trace_text=nonsense"]
    assert main(["infer", "shout", "--url", url, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ['LOUD  BYTES[1, 1]  [["A"]]', "path: root.up"]


def test_a_failed_request_shows_how_far_it_came(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --trace the path of the trailing metadata stands before the error; without, only the error."""
    arguments = ["infer", "shout", "--url", url, "--text", "a", "--param", "full=true"]
    assert main([*arguments, "--trace"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "path: root.up!"
    assert main(arguments) == 1
    assert "path:" not in capsys.readouterr().err


def test_text_that_is_not_utf8_is_sent_as_it_is(url: str, core: _Shout) -> None:
    """The bytes of the command line reach the model, which may refuse them."""
    assert main(["infer", "shout", "--url", url, "--text", os.fsdecode(b"\xff")]) == 0
    assert core.call is not None
    assert split_bytes(core.call.inputs["TEXT"].data) == [b"\xff"]


@pytest.mark.parametrize("timeout_ms", ["1e18", "1e300"])
def test_a_deadline_far_away_is_no_passed_one(url: str, timeout_ms: str) -> None:
    """GRPC's own clock ends after 292 years."""
    assert main(["infer", "shout", "--url", url, "--text", "a", "--timeout-ms", timeout_ms]) == 0


def test_a_deadline_that_passes_is_told_with_its_length(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who did not answer, within what, and what allows longer."""
    arguments = ["--text", "a", "--param", "hold=true", "--timeout-ms", "200"]
    assert main(["infer", "shout", "--url", url, *arguments]) == 1
    expected = f"weft: DEADLINE_EXCEEDED: '{url}' did not answer within 200 ms; --timeout-ms allows longer\n"
    assert expected == capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "--text", "a"], "weft: NOT_FOUND: Request for unknown model: 'nope' is not found"),
        (["shout", "--text", "a", "--param", "full=true"], "weft: RESOURCE_EXHAUSTED: shout: queue is full"),
        (["shout", "--input", "X=1"], "weft: INVALID_ARGUMENT: no input 'X'; the inputs are TEXT BYTES[-1, 1]"),
        (["shout", "--file", "/no/such/file"], "weft: cannot read '/no/such/file': No such file or directory"),
    ],
)
def test_an_error_is_its_status_and_message(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit status 1, nothing on standard output, the status and the text on standard error."""
    assert main(["infer", *arguments, "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)


def test_a_router_that_is_down_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at the address: UNAVAILABLE and the address."""
    assert main(["infer", "shout", "--url", "127.0.0.1:1", "--text", "a", "--timeout-ms", "2000"]) == 1
    assert "weft: UNAVAILABLE: '127.0.0.1:1' cannot be reached" in capsys.readouterr().err
