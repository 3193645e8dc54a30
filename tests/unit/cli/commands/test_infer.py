"""`weft infer` against a V2 server in a thread of its own."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.errors import NotFoundError, ResourceExhaustedError, UnsupportedError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import bytes_tensor, decode, encode, split_bytes
from weft.cli.__main__ import main
from weft.router.repository.config import config_of_signature
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos.model_config_pb2 import ModelConfig

SIGNATURE = ModelSignature(
    "shout", "3", "graph", 8, (TensorSpec("TEXT", "BYTES", (1,)),), (TensorSpec("LOUD", "BYTES", (1,)),)
)
SPELL = ModelSignature(
    "spell",
    "3",
    "graph",
    0,
    (
        TensorSpec("text_input", "BYTES", (1,)),
        TensorSpec("sampling_parameters", "BYTES", (1,), is_optional=True),
        TensorSpec("stream", "BOOL", (1,), is_optional=True),
    ),
    (TensorSpec("text_output", "BYTES", (1,)), TensorSpec("NUMBER", "INT64", (1,))),
    is_decoupled=True,
)
STEPS = [{"path": "root/up", "target": "model", "model": "upper", "version": "1", "ms": 0.5, "status": "OK"}]
TRACE = json.dumps(STEPS)
SIGNATURES = {"shout": SIGNATURE, "spell": SPELL, "count": replace(SPELL, name="count")}


class _Shout(InferenceCore):
    """Answers in capitals, never with the parameter `hold`; keeps the last call.

    `spell` is decoupled and gives a character in each response, with the parameter `fail` an error after two; `count`
    gives numbers.
    """

    def __init__(self) -> None:
        self.call: InferCall | None = None
        self.headers: Mapping[str, str] = {}
        self.remaining_ms = 0.0
        self.has_config = True

    def signature(self, name: str, version: str) -> ModelSignature:
        if name not in SIGNATURES:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return SIGNATURES[name]

    def config(self, name: str, version: str) -> ModelConfig:
        if not self.has_config:
            raise UnsupportedError("this server has no ModelConfig")
        return config_of_signature(SIGNATURES[name])

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        self.call = call
        text = split_bytes(call.inputs["text_input"].data)[0].decode()
        for number, char in enumerate(text, start=1):
            if call.parameters.get("fail") and number == 3:
                raise ResourceExhaustedError("out of letters")
            outputs = {"NUMBER": encode(np.array([number]))}
            if call.model_name == "spell":
                outputs["text_output"] = bytes_tensor([char], (1,))
            yield InferResult(call.model_name, "3", "", {}, outputs, is_final=False)
        trace = str(call.parameters.get("trace_text", TRACE)) if call.parameters.get("graph_trace") else ""
        yield InferResult(call.model_name, "3", "", {"graph_trace": trace}, is_null=not trace)

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
        trace = str(call.parameters.get("trace_text", TRACE))
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
        server = make_server()
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


def test_an_answer_is_json_on_request(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the V2 protocol has it, a line for each response; bytes that are no text are base64."""
    assert main(["infer", "shout", "--url", url, "--text", "hello", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert ("shout", "3") == (answer["model_name"], answer["model_version"])
    assert [{"name": "LOUD", "datatype": "BYTES", "shape": [1, 1], "data": ["HELLO"]}] == answer["outputs"]
    assert main(["infer", "shout", "--url", url, "--text", os.fsdecode(b"\xff"), "--json"]) == 0
    assert [{"b64": "/w=="}] == json.loads(capsys.readouterr().out)["outputs"][0]["data"]
    assert main(["infer", "count", "--url", url, "--text", "ab", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[1], [2]] == [line["outputs"][0]["data"] for line in lines if line["outputs"]]


def test_escape_sequences_of_a_server_reach_no_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in values, C1 controls included, nor in errors."""
    assert main(["infer", "shout", "--url", url, "--text", "\x1b[2J\x9b2J\u202e"]) == 0
    assert main(["infer", "a\x1b[2J\x9b", "--url", url, "--text", "a"]) == 1
    told = capsys.readouterr()
    assert not set("\x1b\x9b\u202e") & set(told.out + told.err)
    assert "\ufffd" in told.err


def test_the_text_of_a_stream_flows(url: str, core: _Shout, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a break; then the last response's other outputs, how many came, and when. A stream is asked for."""
    assert 0 == main(["infer", "spell", "--url", url, "--text", "héllo\n\tyou\x1b"])
    captured = capsys.readouterr().out
    assert captured.startswith("héllo\n\tyou\ufffd\nNUMBER  INT64[1]  [11]\nspell: 11 responses in ")
    assert " ms, the first after " in captured
    assert core.call is not None
    assert [True] == decode(core.call.inputs["stream"]).tolist()
    assert ["text_input", "stream"] == list(core.call.inputs)
    assert 0 == main(["infer", "spell", "--url", url, "--text", "", "--input", "stream=false"])
    assert capsys.readouterr().out.startswith("spell: 0 responses in ")
    assert [False] == decode(core.call.inputs["stream"]).tolist()


def test_responses_without_text_are_shown_one_by_one(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each on a line, as it comes."""
    assert 0 == main(["infer", "count", "--url", url, "--text", "ab"])
    lines = capsys.readouterr().out.splitlines()
    assert ["NUMBER  INT64[1]  [1]", "NUMBER  INT64[1]  [2]"] == lines[:2]
    assert lines[2].startswith("count: 2 responses in ")


def test_an_error_in_mid_stream_follows_what_came(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The text before it has a line of its own; status, message and exit status are those of any error."""
    assert 1 == main(["infer", "spell", "--url", url, "--text", "abcd", "--param", "fail=true"])
    captured = capsys.readouterr()
    assert ("ab\n", "weft: RESOURCE_EXHAUSTED: out of letters\n") == (captured.out, captured.err)


def test_a_server_without_configurations_answers_once(url: str, core: _Shout) -> None:
    """`ModelConfig` is an extension; where it is not there, no model is decoupled."""
    core.has_config = False
    assert 0 == main(["infer", "shout", "--url", url, "--text", "a"])


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


def test_the_trace_of_a_stream_comes_with_its_end(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tree of the steps and the total follow the responses."""
    assert 0 == main(["infer", "spell", "--url", url, "--text", "a", "--trace"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert ["root", "└─ up       0.50 ms  upper@1 on model"] == lines[:2]
    assert lines[2].startswith("total: 0.50 ms in the graph, ")


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
        (
            ["shoot", "--text", "a"],
            "weft: NOT_FOUND: Request for unknown model: 'shoot' is not found; did you mean 'shout'?",
        ),
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
