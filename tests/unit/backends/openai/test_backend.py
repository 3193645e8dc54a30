"""A model of the backend ``openai`` before a server of a few lines that answers as it is told to, over real sockets."""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.case_files import Case, cases
from tests.certificates import Authority

from weft.backends import BACKENDS
from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError, UnavailableError, WeftError
from weft.base.tensors import bytes_tensor, decode, encode, split_bytes
from weft.serving.core import ServingCore

WAIT_S = 20.0
KEY = "secret-key"
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
Handler = Callable[[str, Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """An HTTP server; ``handle`` gets path, body, and the connection, which ends with it."""

    def __init__(self, handle: Handler) -> None:
        self.handle = handle
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.num_open = 0
        self.url = ""
        self._changed = asyncio.Condition()

    async def until_closed(self) -> None:
        """Return when no connection is open."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self.num_open == 0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            path, body = head[0].split()[1], json.loads(data) if data else None
            self.requests.append((path, headers, body))
            with contextlib.suppress(ConnectionError):
                await self.handle(path, body, reader, writer)
                await writer.drain()
        finally:
            writer.close()
            async with self._changed:
                self.num_open -= 1
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def serving(handle: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(handle)
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0, ssl=context)
    scheme = "http" if context is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    async with listening:
        yield server


@contextlib.asynccontextmanager
async def core_of(root: Path, url: str, text: str = "", **parameters: Any) -> AsyncIterator[ServingCore]:
    """A model service with the model ``m``."""
    (root / "m" / "1").mkdir(parents=True)
    given = {"base_url": url, "api_key_env": "TEST_KEY", "api": "completions"} | parameters
    spelled = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in given.items()
    )
    (root / "m" / "config.pbtxt").write_text(f'backend: "openai"\n{text}\n{spelled}')
    core = ServingCore(root, {"openai": BACKENDS["openai"]}, num_gpus=0)
    await core.start()
    try:
        yield core
    finally:
        await core.close(grace_s=5)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)


def call_of(*, stream: bool = False, outputs: tuple[str, ...] = OUTPUTS, **sampling: Any) -> InferCall:
    inputs = {
        "text_input": bytes_tensor(["one two"], (1,)),
        "stream": encode(np.array([stream])),
        "sampling_parameters": bytes_tensor([json.dumps({"temperature": 0, "max_tokens": 4} | sampling)], (1,)),
        "exclude_input_in_output": encode(np.array([True])),
    }
    return InferCall("m", request_id="r-1", inputs=inputs, outputs=tuple(RequestedOutput(name, {}) for name in outputs))


async def responses(core: ServingCore, call: InferCall, deadline_s: float = WAIT_S) -> AsyncIterator[InferResult]:
    context = CallContext(deadline_ns=time.monotonic_ns() + int(deadline_s * 1e9))
    async with asyncio.timeout(WAIT_S):
        async for result in core.stream_infer(call, context):
            if result.error is not None:
                raise result.error
            if not result.is_null:
                yield result


def line_of(result: InferResult) -> str:
    texts = [split_bytes(result.outputs[name].data) for name in ("text_output", "finish_reason")]
    pairs = [f"{text.decode()!r} {reason.decode()}" for text, reason in zip(*texts, strict=True)]
    counts = [str(decode(result.outputs[name]).tolist()) for name in OUTPUTS[2:]]
    more = [split_bytes(result.outputs[name].data)[0].decode() for name in ("logprobs",) if name in result.outputs]
    return " ".join([*pairs, *counts, *more])


@cases(Path(__file__).with_name("answers.txt"))
async def test_what_the_server_answers(case: Case, tmp_path: Path) -> None:
    """Becomes responses, or an error with a status; the key is in none."""
    options = dict(case.options)
    is_stream, sampling = "stream" in options, json.loads(case.option("sampling", "{}"))

    async def handle(path: str, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = (case.text + "\n").encode() * int(case.option("repeat", "1"))
        if is_stream and "repeat" in options:
            data = data.replace(b"\n", b" ")
        head = [f"HTTP/1.1 {case.option('status', '200')} x", *([options["header"]] if "header" in options else [])]
        if "hang-in-headers" in options:
            writer.write(head[0].encode())
        elif case.text or "hang" not in options:
            length = case.option("length", str(len(data)))
            sized = [] if is_stream else [f"content-length: {length}"]
            writer.write("\r\n".join([*head, *sized, "connection: close", "\r\n"]).encode() + data)
        if "hang" in options or "hang-in-headers" in options:
            await reader.read()

    limits: dict[str, Any] = {"max_failures": 0, "read_timeout_s": 0.3, "max_response_bytes": 65536}
    found = []
    async with serving(handle) as server:
        async with core_of(tmp_path, server.url, **limits, api=case.option("api", "completions")) as core:
            outputs = (*OUTPUTS, *(("logprobs",) if "logprobs" in sampling else ()))
            try:
                async for result in responses(core, call_of(stream=is_stream, outputs=outputs, **sampling)):
                    found.append(line_of(result))
            except WeftError as error:
                retry_ms = getattr(error, "retry_after_ms", None)
                wait = "" if retry_ms is None else f" {retry_ms} ms"
                found.append(f"{error.code}{wait}: {error.message.replace(server.url, 'URL')}")
        await server.until_closed()
    case.check("\n".join(found))
    assert KEY not in str(found)


async def answer(path: str, body: Any, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say ``ok``, or give each text of an embedding its length."""
    said: Any = {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}]}
    if path.endswith("/embeddings"):
        data = [{"index": i, "embedding": [len(text), 1]} for i, text in enumerate(body["input"])]
        said = {"data": data[::-1], "usage": {"prompt_tokens": 5}}
    text = json.dumps(said)
    writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())


async def test_what_the_server_is_sent(tmp_path: Path) -> None:
    """Sampling parameters as fields, the key, the request's id, and the time that is left."""
    async with serving(answer) as server, core_of(tmp_path, server.url, model="far") as core:
        await core.infer(call_of(speculation="none", top_k=3), CallContext(deadline_ns=time.monotonic_ns() + 10**10))
        ((path, headers, body),) = server.requests
    assert "/v1/completions" == path
    expected = {"model": "far", "prompt": "one two", "stream": False, "temperature": 0, "max_tokens": 4, "top_k": 3}
    assert expected == body
    assert (f"Bearer {KEY}", "r-1") == (headers["authorization"], headers["x-request-id"])
    assert 9 < float(headers["x-request-timeout"]) <= 10


@pytest.mark.parametrize("leaves", ["by the deadline", "cancelled", "closes the stream"])
async def test_a_request_that_ends_early_closes_its_connection(leaves: str, tmp_path: Path) -> None:
    """Before the server answers, and in the middle of a stream; the place is free for the next one."""
    begun = asyncio.Event()

    async def hang(path: str, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 1:
            await answer(path, body, reader, writer)
            return
        if body["stream"]:
            writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n')
        begun.set()
        assert b"" == await reader.read()

    async with serving(hang) as server, core_of(tmp_path, server.url, max_requests=1, max_failures=1) as core:
        if leaves == "closes the stream":
            stream = responses(core, call_of(stream=True))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            context = CallContext(deadline_ns=time.monotonic_ns() + 3 * 10**8 if leaves == "by the deadline" else None)
            asking = asyncio.ensure_future(core.infer(call_of(), context))
            await begun.wait()
            if leaves == "cancelled":
                asking.cancel()
            with pytest.raises((WeftError, asyncio.CancelledError)) as caught:
                await asking
            assert leaves == "cancelled" or "DEADLINE_EXCEEDED" == getattr(caught.value, "code", "")
        await server.until_closed()
        async with asyncio.timeout(WAIT_S):
            assert b"ok" in (await core.infer(call_of(), CallContext())).outputs["text_output"].data


async def test_a_server_that_is_down_fails_requests_at_once(tmp_path: Path) -> None:
    """Until it answers a question for its models."""
    is_down = True

    async def handle(path: str, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_down:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        else:
            await answer(path, body, reader, writer)

    async with serving(handle) as server, core_of(tmp_path, server.url, max_failures=2) as core:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="fails with HTTP status 502"):
                await core.infer(call_of(), CallContext())
        with pytest.raises(UnavailableError, match=r"no instance of model 'm' runs: .* has failed 2 times in a row"):
            await core.infer(call_of(), CallContext())
        assert "/v1/models" == server.requests[-1][0]
        is_down = False
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(UnavailableError):
                    await core.infer(call_of(), CallContext())
                    break
                await asyncio.sleep(0.01)


async def test_certificates_are_checked(tmp_path: Path) -> None:
    """By the authorities of ``tls_ca``; the server may ask for one of the model's own."""
    authority = Authority(tmp_path)
    own, other = authority.issue("server"), authority.issue("client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(own.cert, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    files: dict[str, Any] = {"tls_ca": authority.ca, "tls_cert": other.cert, "tls_key": other.key}
    async with serving(answer, context) as server:
        async with core_of(tmp_path / "known", server.url, **files) as core:
            assert b"ok" in (await core.infer(call_of(), CallContext())).outputs["text_output"].data
        async with core_of(tmp_path / "unknown", server.url) as core:
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await core.infer(call_of(), CallContext())
        assert 1 == len(server.requests)


async def test_nobody_listens(tmp_path: Path) -> None:
    """The model is loaded nevertheless; its requests fail with UNAVAILABLE."""
    async with core_of(tmp_path, "http://127.0.0.1:1/v1") as core:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await core.infer(call_of(), CallContext())


async def test_embeddings(tmp_path: Path) -> None:
    """The rows of a request are one call; the server may give them in any order."""
    async with serving(answer) as server, core_of(tmp_path, server.url, "max_batch_size: 4", api="embeddings") as core:
        call = InferCall("m", inputs={"text_input": bytes_tensor(["a", "bb", "ccc"], (3, 1))}, num_rows=3)
        result = await core.infer(call, CallContext())
    assert [[1, 1], [2, 1], [3, 1]] == decode(result.outputs["embedding"]).tolist()
    assert [[5], [0], [0]] == decode(result.outputs["num_input_tokens"]).tolist()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"n": 0}, "n must be from 1 to 128, got 0"),
        ({"n": True}, "n must be from 1 to 128, got True"),
        ({"max_tokens": 2**31 - 1}, "max_tokens must be given"),
    ],
)
async def test_bad_sampling_parameters_are_refused(sampling: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Those that the server is not asked about."""
    async with serving(answer) as server, core_of(tmp_path, server.url) as core:
        with pytest.raises(InvalidArgumentError, match=words):
            await core.infer(call_of(**sampling), CallContext())
        assert [] == server.requests


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"base_url": ""}, "'base_url' must be http:// or https://"),
        ({"base_url": "ftp://host/v1"}, "got 'ftp://host/v1'"),
        ({"base_url": "http://me:secret@host/v1"}, "got 'http://host/v1'"),
        ({"base_url": "http://:secret@host/v1"}, "got 'http://host/v1'"),
        ({"base_url": "http://[host/v1"}, "'base_url' must be http:// or https://"),
        ({"api": "responses"}, "one of chat, completions, embeddings"),
        ({"api_key_env": "NOT_SET"}, "environment variable 'NOT_SET'"),
        ({"tls_cert": "a"}, "together with 'tls_key'"),
        ({"base_url": "https://host/v1", "tls_ca": "/no/file"}, "tls_ca, tls_cert or tls_key"),
        ({"modle": "x"}, "unknown parameter 'modle'; did you mean 'model'?"),
        ({"connect_timeout_s": 0}, "'connect_timeout_s' must be more than 0"),
    ],
)
async def test_a_bad_configuration_is_not_served(parameters: dict[str, Any], words: str, tmp_path: Path) -> None:
    """And says what is wrong with it."""
    async with core_of(tmp_path, "http://127.0.0.1:1/v1", **parameters) as core:
        (entry,) = core.index(ready_only=False)
        assert words in entry.reason
