"""The examples of docs/extending.md run as they stand there."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from starlette.types import ASGIApp
from tests.unit.serving.builders import make_request

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError, WeftError
from weft.base.tensors import Array, bytes_tensor, decode, encode, split_bytes
from weft.base.text.pbtxt import PbtxtError
from weft.gateway.http.request_context import RequestTracker
from weft.gateway.http.resources import Limits, Resources
from weft.gateway.main import Gateway
from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.endpoint import Models
from weft.serving.backends.base import Backend, Batch
from weft.serving.config import define_model
from weft.serving.core import ServingCore
from weft.serving.queues import QUEUES, PolicyQueue
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceResponse, Outcome
from weft.serving.scheduler.batcher import make_batcher
from weft_protos.model_config_pb2 import ModelConfig

S = 1_000_000_000
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


@pytest.fixture
def edf(monkeypatch: pytest.MonkeyPatch) -> type[PolicyQueue]:
    """The queue policy of the page, registered."""
    (code,) = blocks("A queue policy", "python")
    queue: type[PolicyQueue] = module(code, "edf").EarliestDeadlineQueue
    monkeypatch.setitem(QUEUES, "edf", queue)
    return queue


def queued(edf: type[PolicyQueue], *deadlines_s: int | None, **settings: Any) -> tuple[PolicyQueue, list[Any], Any]:
    """A queue with requests of these deadlines, the requests, and the settings, for batches of four rows."""
    made = SchedulerSettings(4, is_batching=True, queue_policy="edf", **settings)
    queue, requests = edf(made), [make_request(deadline_ns=at_s and at_s * S) for at_s in deadlines_s]
    for request in requests:
        queue.add(request, 0)
    queue.check_integrity()
    return queue, requests, made


def test_a_queue_policy_orders_batches(edf: type[PolicyQueue]) -> None:
    """Batches are formed of the nearest deadlines; equal ones are served by arrival, and those without one last."""
    queue, requests, settings = queued(edf, None, 9, None, 5, 9, 7)
    batcher, batches = make_batcher(settings), []
    while batch := batcher.next_batch(queue, 0).requests:
        queue.take(batch, 0)
        queue.check_integrity()
        batches.append([requests.index(request) for request in batch])
    assert batches == [[3, 5, 1, 4], [0, 2]]


def test_a_queue_policy_waits_no_longer_than_a_member_may(edf: type[PolicyQueue]) -> None:
    """The batcher holds requests back for others, and sends them in time for the nearest deadline."""
    queue, (slow, urgent), settings = queued(edf, 60, 8, max_queue_delay_us=10 * 1_000_000)
    batcher = make_batcher(settings)
    assert ([], 4 * S, None) == batcher.next_batch(queue, 0)
    assert [urgent, slow] == batcher.next_batch(queue, 4 * S).requests


def test_a_queue_policy_expires_and_withdraws(edf: type[PolicyQueue]) -> None:
    """What is too late leaves with an error when its time comes, what is cancelled at once, and the rest stays."""
    queue, (first, second, last, other), _ = queued(edf, 5, 9, None, 9)
    assert 5 * S == queue.next_expiry_ns()
    assert [first] == [expired.request for expired in queue.expire(5 * S)]
    assert (True, False, False) == (queue.remove(second), queue.remove(second), queue.remove(first))
    assert [other, last] == list(queue)
    queue.check_integrity()


def test_a_queue_policy_refuses_and_puts_back(edf: type[PolicyQueue]) -> None:
    """A full queue refuses, a passed deadline too; a timeout with DELAY moves a request to those without deadline."""
    policy = WaitPolicy("DELAY", default_timeout_us=1_000_000, max_queue_size=2)
    queue, (urgent, late), _ = queued(edf, 5, None, default_policy=policy)
    with pytest.raises(ResourceExhaustedError, match="Exceeds maximum queue size: 2 requests wait already"):
        queue.add(make_request(), 0)
    assert [] == queue.expire(S)
    assert [urgent, late] == list(queue)
    queue.remove(late)
    with pytest.raises(DeadlineExceededError):
        queue.add(make_request(deadline_ns=S), S)
    queue.add(soon := make_request(deadline_ns=9 * S), S)
    assert [soon, urgent] == list(queue)
    assert [urgent] == [expired.request for expired in queue.expire(5 * S)]
    queue.check_integrity()


def test_a_queue_policy_tells_what_goes_before(edf: type[PolicyQueue]) -> None:
    """A deadline is held against the rows that are served first, those of nearer deadlines, and only those."""
    queue, _, _ = queued(edf, None, 5, 9)
    deadlines_s = (1, 5, 7, 9, None)
    rows = [queue.num_rows_before(make_request(deadline_ns=at_s and at_s * S)) for at_s in deadlines_s]
    assert [0, 1, 1, 2, 3] == rows


async def test_a_queue_policy_serves_a_model(edf: type[PolicyQueue], folder: Path) -> None:
    """A model that names it in its configuration answers requests in its order."""
    (config,) = blocks("A queue policy", "pbtxt")
    (folder / "config.pbtxt").write_text(config.replace("max_batch_size: 8", "max_batch_size: 1"))
    is_open, begun, executed = threading.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    class Gate(Backend):
        def load(self) -> None:
            pass

        def execute(self, batch: Batch) -> list[Outcome]:
            loop.call_soon_threadsafe(begun.set)
            assert is_open.wait(10)
            executed.extend(int(request.array("X")[0, 0]) for request in batch.requests)
            return [InferenceResponse({"Y": request.array("X")}) for request in batch.requests]

    core = ServingCore(folder.parent, {"log": Gate}, num_gpus=0)
    await core.start()
    answers = []
    for number, left_s in enumerate((None, None, 60, 30)):
        deadline_ns = None if left_s is None else time.monotonic_ns() + left_s * S
        call = InferCall("m", inputs={"X": encode(np.full((1, 2), number, np.float32))})
        answers.append(asyncio.ensure_future(core.infer(call, CallContext(deadline_ns=deadline_ns))))
        if number == 0:
            await begun.wait()  # the others wait for the instance
    await asyncio.sleep(0)
    is_open.set()
    await asyncio.gather(*answers)
    await core.close(grace_s=5)
    assert [0, 3, 2, 1] == executed


@pytest.mark.parametrize(
    ("name", "batching", "fault"),
    [
        ("fifo", "", r"config.pbtxt:6:56: .*'queue_policy' must be one of priority_levels.*edf.*, got 'fifo'"),
        ("edf", "priority_levels: 2 default_priority_level: 1", r"config.pbtxt:3:37: .*'edf' has no levels; remove"),
    ],
)
def test_a_queue_policy_is_checked(edf: type[PolicyQueue], folder: Path, name: str, batching: str, fault: str) -> None:
    """A name that is not registered, and levels beside a policy without them, are told with file, line and column."""
    (config,) = blocks("A queue policy", "pbtxt")
    config = config.replace('"edf"', f'"{name}"').replace("max_queue_delay_microseconds: 100", batching)
    (folder / "config.pbtxt").write_text(config)
    with pytest.raises(PbtxtError, match=fault):
        define_model(folder, (1,), {"log": Backend}, num_gpus=0)  # type: ignore[type-abstract]


def test_an_llm_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class reads a folder of transformers, and its logits are those of transformers, in chunks too."""
    import torch
    import transformers

    from weft.llm.models import registry
    from weft.llm.models.model import TransformerModel
    from weft.llm.models.weights import load_folder

    (code,) = blocks("An LLM architecture", "python")
    monkeypatch.setattr(registry, "ARCHITECTURES", [*registry.ARCHITECTURES, module(code, "ministral").Ministral])
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 9,
        "attn_implementation": "eager",
    }
    theirs = transformers.MinistralForCausalLM(transformers.MinistralConfig(**shape, **heads)).eval()
    for parameter in theirs.parameters():
        parameter.data.mul_(6.0 if parameter.dim() == 2 else 1.0)  # so that a wrong mask or rotation shows
    theirs.save_pretrained(tmp_path)
    text, block_size = torch.randint(0, 64, (30,)), 32
    with torch.no_grad():
        expected = theirs(text.unsqueeze(0)).logits[0]
    config = registry.read_config(tmp_path)
    model = TransformerModel(config, load_folder(tmp_path, config), max_model_len=64)
    kv, logits, first = model.new_kv(2, block_size), [], 0
    for chunk in text.split([13, 1, 16]):
        end = first + len(chunk)
        table, ends = torch.ones(1, 1, dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        start = torch.tensor([0, len(chunk)], dtype=torch.int32)
        places = torch.arange(first, end)
        hidden = model.forward(chunk, places.int(), kv, table, start, ends, block_size + places, len(chunk), end)
        logits.append(model.logits(hidden))
        first = end
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-5)


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
    """The endpoint answers, refuses what it cannot take and models of another kind, and has a name in the metrics.

    Fields that it does not know are listed in a header, or refused if the gateway is strict.
    """
    (code,) = blocks("An OpenAI endpoint", "python")
    served = module(code, "token_count").ENDPOINT
    router: Any = CountingRouter()
    resources = Resources(router, Limits(1000, 1000, 1000, 5.0))
    apps = []
    for is_strict in (False, True):
        gateway = Gateway(resources, Models(router, {}), endpoints=(*ENDPOINTS, served), is_strict=is_strict)
        apps.append(RequestTracker(gateway.app(), gateway.endpoint_of, ()))

    async def post(body: Mapping[str, object], app: ASGIApp = apps[0]) -> tuple[int, dict[str, Any]]:
        parts, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], list[Any]()

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": served.path, "headers": headers, "query_string": b""}
        async with asyncio.timeout(20):
            await app(scope, receive, send)
        ignored.append(dict(sent[0]["headers"]).get(b"x-weft-ignored-fields", b"").decode())
        return sent[0]["status"], json.loads(b"".join(message["body"] for message in sent[1:]))

    ignored: list[str] = []
    body = {"model": "words", "prompt": "one two three"}
    assert 200 == (await post(body | {"promt": 1, "what\n,é": [{}], "user": None}))[0]
    assert 400 == (await post(body | {"promt": 1}, apps[1]))[0]
    assert ["promt, what???", ""] == ignored
    assert (200, {"model": "words", "num_tokens": 3}) == await post(body)
    for wrong, message in (
        ({"model": "words"}, "'prompt' must be a string; give one"),
        (body | {"model": "numbers"}, "the model 'numbers' does not take and give text"),
    ):
        status, answer = await post(wrong)
        assert 400 == status
        assert message in answer["error"]["message"]
    (requests, *_) = apps[0].collect()
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
