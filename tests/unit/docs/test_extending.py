"""The examples of docs/extending.md run as they stand there."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import Array, bytes_tensor, decode, encode, split_bytes
from weft.gateway.app import Gateway
from weft.gateway.http.request_context import RequestTracker
from weft.gateway.http.resources import Limits, Resources
from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.models import Models
from weft.serving.backends.base import Backend
from weft.serving.core import ServingCore
from weft_protos.model_config_pb2 import ModelConfig

PAGE = (Path(__file__).parents[3] / "docs/extending.md").read_text()


def blocks(section: str, language: str) -> list[str]:
    """Code of one section of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, section
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def module(code: str, name: str) -> ModuleType:
    """The code as a module that can be imported from nowhere."""
    made = ModuleType(name)
    exec(compile(code, f"docs/extending.md: {name}", "exec"), made.__dict__)
    return made


async def infer(root: Path, backends: Mapping[str, type[Backend]], inputs: Array) -> Array:
    """Output Y of the one model of a repository for X."""
    core = ServingCore(root, backends, num_gpus=0)
    await core.start()
    try:
        result = await core.infer(InferCall("m", inputs={"X": encode(inputs)}), CallContext())
    finally:
        await core.close(grace_s=5)
    return decode(result.outputs["Y"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the model ``m``, with an empty version."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    return tmp_path / "m"


def test_a_transform(folder: Path) -> None:
    """The transform computes, reads its parameter, and refuses the row that has no logarithm."""
    (code,), (config,) = blocks("A transform", "python"), blocks("A transform", "pbtxt")
    (folder / "config.pbtxt").write_text(config)
    backends = {"log": module(code, "log").LogBackend}
    given = np.array([[0, 1], [2, 3]], np.float32)
    assert np.allclose(np.log(given + 1), asyncio.run(infer(folder.parent, backends, given)))
    with pytest.raises(InvalidArgumentError, match=r"input 'X' row 1: -1.0 at \[1\]; send larger numbers"):
        asyncio.run(infer(folder.parent, backends, np.array([[0, 1], [2, -2]], np.float32)))


def test_a_backend(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The backend loads its weights and computes; without them the model is not served, and the log has the cure."""
    (code,), (config,) = blocks("A backend", "python"), blocks("A backend", "pbtxt")
    (folder / "config.pbtxt").write_text(config)
    backends = {"npz_linear": module(code, "npz_linear").NpzLinearBackend}
    given = np.array([[1, 2, 3]], np.float32)
    with pytest.raises(WeftError, match="no available versions"):
        asyncio.run(infer(folder.parent, backends, given))
    assert "save it with numpy.savez" in caplog.text
    weight, bias = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, -1], np.float32)
    np.savez(folder / "1" / "weights.npz", weight=weight, bias=bias)
    assert np.allclose(given @ weight + bias, asyncio.run(infer(folder.parent, backends, given)))


COMPARE = """
import torch, reference, triton_kernel
for shape in [(1, 1), (3, 33), (2, 1025)]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    formula = x.double().clamp(min=0) ** 2
    for module in (reference, triton_kernel):
        assert (module.relu_squared(x) - formula).abs().max() < 1e-4
try:
    triton_kernel.relu_squared(torch.zeros(4))
except ValueError as error:
    print(error)
"""


class CountingRouter:
    """A router with a language model that answers with the number of a prompt's words, and one model without text."""

    async def call(self, method: str, request: object, **_: object) -> None:
        assert "ServerMetadata" == method

    async def config(self, name: str, **_: object) -> ModelConfig:
        texts = [] if name == "numbers" else [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
        outputs = [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]
        return ParseDict({"name": name, "input": texts, "output": outputs}, ModelConfig())

    async def stream(self, call: InferCall, **_: object) -> AsyncGenerator[InferResult, None]:
        (prompt,) = split_bytes(call.inputs["text_input"].data, name="text_input")
        counts = {"num_input_tokens": len(prompt.split()), "num_output_tokens": 1}
        outputs = {name: encode(np.array([count], np.uint32)) for name, count in counts.items()}
        yield InferResult(call.model_name, "1", outputs={"text_output": bytes_tensor(["x"], (1,)), **outputs})


async def test_an_openai_endpoint() -> None:
    """The endpoint answers, refuses what it cannot take and models of another kind, and has a name in the metrics."""
    (code,) = blocks("An OpenAI endpoint", "python")
    served = module(code, "token_count").ENDPOINT
    router: Any = CountingRouter()
    resources = Resources(router, Limits(1000, 1000, 1000, 5.0))
    gateway = Gateway(resources, Models(router, {}), endpoints=(*ENDPOINTS, served))
    app = RequestTracker(gateway.app(), gateway.endpoint_of, ())

    async def post(body: Mapping[str, object]) -> tuple[int, dict[str, Any]]:
        parts, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], list[Any]()

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": served.path, "headers": headers, "query_string": b""}
        async with asyncio.timeout(20):
            await app(scope, receive, send)
        return sent[0]["status"], json.loads(b"".join(message["body"] for message in sent[1:]))

    body = {"model": "words", "prompt": "one two three"}
    assert (200, {"model": "words", "num_tokens": 3}) == await post(body)
    for wrong, message in (
        ({"model": "words"}, "'model' and 'prompt' must be strings; give both"),
        (body | {"promt": 1}, "Unrecognized request argument supplied: 'promt'; did you mean 'prompt'?"),
        (body | {"model": "numbers"}, "the model 'numbers' does not take and give text"),
    ):
        status, answer = await post(wrong)
        assert 400 == status
        assert message in answer["error"]["message"]
    (requests, *_) = app.collect()
    assert {"/v1/token_count"} == {sample.labels["endpoint"] for sample in requests.samples}
    resources.close()


def test_a_kernel(tmp_path: Path) -> None:
    """Reference and kernel agree with the formula over odd sizes, and the launcher refuses what it cannot take."""
    reference, kernel, dispatch = blocks("A kernel", "python")
    (tmp_path / "reference.py").write_text(reference)
    (tmp_path / "triton_kernel.py").write_text(kernel)
    result = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "x must be 2-D and contiguous, got shape (4,); call .contiguous() first\n" == result.stdout, result.stderr
    assert '_pick("relu_squared", "relu_squared", x)' in dispatch
