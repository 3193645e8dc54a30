"""A V2 server whose language model says what it is told to, and gateway processes before a router."""

import asyncio
import http.client
import json
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.integration.routing import naming_service, running_router
from tests.processes import WAIT_S, running

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import WireTensor, bytes_tensor, decode, encode, split_bytes
from weft.router.repository.config import config_of_signature
from weft_protos.model_config_pb2 import ModelConfig

#: Every message in one line, so that a prompt shows what became of it.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% if message.content == 'oops' %}{{ messages.append(1) }}{% endif %}"
    "{{ message.role }}:{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ mood }}{% endif %}"
)
#: Of a model that says what the last message says, and calls tools as Qwen does.
CALLER_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ effort }}"
    "{% for message in messages if message.tool_calls %}{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function.arguments | tojson }}{{ '=' + call.function.arguments }}{% endfor %}{% endfor %}"
    "{{ messages[-1].content }}{% if think %} <think>{% endif %}"
)
TALKERS = ("talker", "plain", "caller")

_FAULTS = {
    "FULL": lambda: ResourceExhaustedError("the queue is full", retry_after_ms=1500),
    "LATE": lambda: DeadlineExceededError("too late"),
    "WRONG": lambda: InvalidArgumentError("top_k is wrong"),
    "DOWN": lambda: UnavailableError("not ready"),
    "BROKEN": lambda: RuntimeError("a secret of the model"),
}


class TalkerCore(InferenceCore):
    """``talker``, with a chat template, and ``plain``, without, say their prompt word by word; ``mute`` has no text.

    ``caller`` has a template with tools, so that what it says can be a call.

    A word may be an order: ``HANG`` waits until the caller leaves, ``ODD`` answers with what cannot be, and a name in
    ``_FAULTS`` fails. Choice 1 of several is in capitals. The id of a token is the length of its text.

    Attributes:
        calls: Everything that came, in order.
        contexts: What surrounded it.
        num_open: Calls in work.
    """

    def __init__(self) -> None:
        self.calls: list[InferCall] = []
        self.contexts: list[CallContext] = []
        self.num_open = 0
        self._changed = threading.Condition()

    def until(self, claim: Any) -> None:
        """Return when ``claim()`` holds; for the thread of the test."""
        with self._changed:
            assert self._changed.wait_for(claim, WAIT_S), f"{self.num_open} open, {len(self.calls)} came"

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of the last call."""
        return json.loads(split_bytes(self.calls[-1].inputs["sampling_parameters"].data)[0])

    def prompt(self) -> str:
        """The text of the last call."""
        return split_bytes(self.calls[-1].inputs["text_input"].data)[0].decode()

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> ModelSignature:
        if name not in (*TALKERS, "mute"):
            raise NotFoundError(f"unknown model '{name}'")
        if name == "mute":
            x = (TensorSpec("X", "FP32", (1,)),)
            return ModelSignature(name, "1", "talking", 0, x, x)
        inputs = [
            TensorSpec("text_input", "BYTES", (1,), is_optional=True),
            TensorSpec("stream", "BOOL", (1,), is_optional=True),
            TensorSpec("sampling_parameters", "BYTES", (1,), is_optional=True),
        ]
        if name != "plain":
            inputs.append(TensorSpec("input_ids", "INT32", (-1,), is_optional=True))
        outputs = [
            TensorSpec("text_output", "BYTES", (-1,)),
            TensorSpec("output_ids", "INT32", (-1,)),
            TensorSpec("finish_reason", "BYTES", (-1,)),
            TensorSpec("stop_reason", "BYTES", (-1,)),
            TensorSpec("logprobs", "BYTES", (-1,)),
            TensorSpec("num_input_tokens", "UINT32", (1,)),
            TensorSpec("num_output_tokens", "UINT32", (-1,)),
        ]
        return ModelSignature(name, "1", "talking", 0, tuple(inputs), tuple(outputs), is_decoupled=True)

    def config(self, name: str, version: str) -> ModelConfig:
        config = config_of_signature(self.signature(name, version))
        if name == "talker":
            config.parameters["chat_template"].string_value = TEMPLATE
            config.parameters["bos_token"].string_value = "<s>"
        if name == "caller":
            config.parameters["chat_template"].string_value = CALLER_TEMPLATE
            config.parameters["reasoning_parser"].string_value = "think"
        return config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY", "") for name in (*TALKERS, "mute")]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        params = json.loads(split_bytes(call.inputs["sampling_parameters"].data)[0])
        if "input_ids" in call.inputs:
            words = [str(token) for token in decode(call.inputs["input_ids"]).tolist()]
        else:
            words = split_bytes(call.inputs["text_input"].data)[0].decode().split()
        num_input = len(words)
        reason = "stop"
        if len(words) > params["max_tokens"]:
            words, reason = words[: params["max_tokens"]], "length"
        for stop in params.get("stop", ()):
            if stop in words:
                words, reason, params["stopped_by"] = words[: words.index(stop)], "stop", stop
        is_streamed = bool(decode(call.inputs["stream"])[0])
        self._tell(1, call, context)
        try:
            rest: list[str] = []
            for index, word in enumerate(words):
                if word == "HANG":
                    await asyncio.Event().wait()
                if word in _FAULTS:
                    raise _FAULTS[word]()
                if word == "ODD":
                    yield self._answer(call, {"text_output": bytes_tensor(["a"] * 9, (9,))})
                rest.append(word + " " * (index < len(words) - 1))
                if is_streamed and index < len(words) - 1:
                    yield self._piece(call, rest, "None", num_input, params)
                    rest = []
            yield self._piece(call, rest, reason, num_input, params)
        finally:
            self._tell(-1)
        yield InferResult(call.model_name, "1", call.request_id, is_null=True)

    def _piece(
        self, call: InferCall, tokens: list[str], reason: str, num_input: int, params: dict[str, Any]
    ) -> InferResult:
        n = params.get("n", 1)
        own = [[token.upper() if choice % 2 else token for token in tokens] for choice in range(n)]
        logprobs = [json.dumps(list(map(_logprob, tokens)) if "logprobs" in params else None) for tokens in own]
        tensors = {
            "text_output": bytes_tensor(["".join(tokens) for tokens in own], (n,)),
            "output_ids": encode(np.array([len(token) for tokens in own for token in tokens], np.int32)),
            "finish_reason": bytes_tensor([reason] * n, (n,)),
            "stop_reason": bytes_tensor([params.get("stopped_by", "")] * n, (n,)),
            "logprobs": bytes_tensor(logprobs, (n,)),
            "num_input_tokens": encode(np.array([num_input], np.uint32)),
            "num_output_tokens": encode(np.array([len(tokens)] * n, np.uint32)),
        }
        wanted = {output.name for output in call.outputs}
        return self._answer(call, {name: tensor for name, tensor in tensors.items() if name in wanted})

    def _answer(self, call: InferCall, tensors: dict[str, WireTensor]) -> InferResult:
        return InferResult(call.model_name, "1", call.request_id, {}, tensors, is_final=False)

    def _tell(self, num_open: int, call: InferCall | None = None, context: CallContext | None = None) -> None:
        with self._changed:
            self.num_open += num_open
            if call is not None and context is not None:
                self.calls.append(call)
                self.contexts.append(context)
            self._changed.notify_all()


def _logprob(token: str) -> dict[int, dict[str, Any]]:
    """The token is the second of three; the third is a part of a character."""
    return {
        1000: {"logprob": -0.25, "rank": 1, "decoded_token": "best"},
        len(token): {"logprob": -0.5, "rank": 2, "decoded_token": token},
        1001: {"logprob": -4.0, "rank": 3, "decoded_token": "\ufffd"},
    }


class GatewayProcess(NamedTuple):
    """A running gateway; ``address`` is that of HTTP, ``url`` what OpenAI's clients take."""

    process: "subprocess.Popen[str]"
    address: str
    metrics: str
    url: str

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, JSON and headers of the answer to JSON, or to bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        try:
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text else None, response.headers
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        """The same of a POST, of JSON if nothing else is said."""
        return self.ask("POST", path, body, **{"content_type": "application/json", **headers})


@contextmanager
def running_gateway(router: str, *arguments: str) -> Iterator[GatewayProcess]:
    """A gateway before a router; it has ended by itself, with status 0, when the block is left."""
    ports = ("--port", "0", "--metrics-port", "0", "--stop-with-stdin")
    with running("weft.gateway", "--router", router, *ports, *arguments) as gateway:
        yield GatewayProcess(gateway.process, gateway.http, gateway.metrics, f"http://{gateway.http}/v1")


@contextmanager
def talking_gateway(core: TalkerCore, graphs: Path) -> Iterator[GatewayProcess]:
    """A gateway before a router with the graphs of a folder, before a service of ``core``."""
    with (
        naming_service(core) as address,
        running_router(graphs, address) as router,
        running_gateway(router.grpc) as gateway,
    ):
        yield gateway


#: What a model says that calls two functions, of which the first takes ``PARAMETERS``.
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = (
    'Let me see. <tool_call> {"name": "weather", "arguments": {"city": "Bonn"}} </tool_call> '
    '<tool_call> {"name": "now"} </tool_call>'
)
