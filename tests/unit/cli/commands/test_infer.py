"""`weft infer` against a V2 server in a thread of its own."""

import asyncio
import json
import os
import re
import shlex
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.case_files import Case, cases

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
    """Answers in capitals, never with the parameter `hold`, with its text as the trace with `traces`; keeps the call.

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
        return config_of_signature(self.signature(name, version))

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
        trace = TRACE if call.parameters.get("graph_trace") else ""
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
        trace = split_bytes(call.inputs["TEXT"].data)[0].decode() if call.parameters.get("traces") else TRACE
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


def sent(core: _Shout) -> str:
    """The last call, as far as its command said what is in it."""
    call = core.call
    assert call is not None
    words = [f"{name}={decode(tensor).tolist()}" for name, tensor in call.inputs.items()]
    words += [
        f"{name}={value}" for name, value in sorted(call.parameters.items()) if name not in ("traces", "graph_trace")
    ]
    words += [f"id={call.request_id}"] * bool(call.request_id) + [f"version={call.model_version}"] * bool(
        call.model_version
    )
    words += [f"output={output.name}" for output in call.outputs]
    words += [f"x-user-id={core.headers['x-user-id']}"] if "x-user-id" in core.headers else []
    return f"sent {' '.join(words)}"


@cases(Path(__file__).with_name("infer.txt"))
def test_a_transcript(
    case: Case,
    url: str,
    core: _Shout,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What each command prints, its exit status, and what the server got are as is written down."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "one", "b": "two", "TEXT=c": "three", "text.json": '"hello"'}.items():
        (tmp_path / name).write_text(text)
    lines = []
    for command in case.lines:
        core.call = None
        status = main([*shlex.split(command)[2:], "--url", url])
        out, err = capsys.readouterr()
        out = re.sub(r"(?m)(?<=^total: )(.* ms in the graph, ).*", r"\1N ms", out)
        out = re.sub(r'( version \d+, |responses? in |the first after |"ms": )[\d.,]+', r"\1N", out)
        lines += [f"exit {status}"] * (status != 0) + out.splitlines() + [f"! {line}" for line in err.splitlines()]
        lines += [sent(core)] if core.call is not None and not core.call.parameters.get("traces") else []
    case.check("\n".join(lines).replace(url, "URL"))


def test_parameters_and_deadline_are_sent(url: str, core: _Shout) -> None:
    """A number is one; the deadline is that of --timeout-ms."""
    assert main(["infer", "shout", "--url", url, "--text", "a", "--param", "n=2", "--timeout-ms", "5000"]) == 0
    assert core.call is not None
    assert core.call.parameters == {"n": 2}
    assert 4000 < core.remaining_ms < 5100  # gRPC rounds up to what its header can say


def test_escape_sequences_of_a_server_reach_no_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in values, C1 controls included, nor in errors."""
    assert main(["infer", "shout", "--url", url, "--text", "\x1b[2J\x9b2J\u202e"]) == 0
    assert main(["infer", "a\x1b[2J\x9b", "--url", url, "--text", "a"]) == 1
    told = capsys.readouterr()
    assert not set("\x1b\x9b\u202e") & set(told.out + told.err)
    assert "\ufffd" in told.err


def test_a_server_without_configurations_answers_once(url: str, core: _Shout) -> None:
    """`ModelConfig` is an extension; where it is not there, no model is decoupled."""
    core.has_config = False
    assert 0 == main(["infer", "shout", "--url", url, "--text", "a"])


def test_text_that_is_not_utf8_is_sent_as_it_is(url: str, core: _Shout) -> None:
    """The bytes of the command line reach the model, which may refuse them."""
    assert main(["infer", "shout", "--url", url, "--text", os.fsdecode(b"\xff")]) == 0
    assert core.call is not None
    assert split_bytes(core.call.inputs["TEXT"].data) == [b"\xff"]


def test_a_router_that_is_down_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at the address: UNAVAILABLE and the address."""
    assert main(["infer", "shout", "--url", "127.0.0.1:1", "--text", "a", "--timeout-ms", "2000"]) == 1
    assert "weft: UNAVAILABLE: '127.0.0.1:1' cannot be reached" in capsys.readouterr().err
