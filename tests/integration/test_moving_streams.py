"""Streams of language models whose replicas are killed: they go on at others, and nobody can tell from what came."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.integration.fleet import router_over
from tests.integration.language_model import Service, running_service, write_folder, write_model
from tests.integration.talking import running_gateway
from tests.processes import Running, wait_until
from tests.repositories import write_graph

from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import WeftError
from weft.base.tensors import decode, encode
from weft.v2.client.v2_client import V2Client

GRAPH = """
name: "written" platform: "graph"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
node { name: "root" sequence { step { name: "write" model_name: "story"
  input_map { key: "text_input" value: "text_input" }
  input_map { key: "sampling_parameters" value: "sampling_parameters" }
  constant { input: "stream" boolean: true } } } }
"""
LENGTH = 220
_ALL = ("text_output", "output_ids", "finish_reason", "num_output_tokens", "num_previous_tokens", "cumulative_logprob")
#: Name, sampling parameters, outputs (none: those that come unasked), and whether the prompt is of ids.
REQUESTS: list[tuple[str, dict[str, Any], tuple[str, ...], bool]] = [
    ("greedy", {"temperature": 0}, (), False),
    ("seeded", {"seed": 5, "top_p": 0.9}, ("text_output", "finish_reason"), False),
    ("ids alone", {"seed": 6}, (), True),
    ("counted", {"seed": 7, "logprobs": 2, "min_tokens": 150}, (*_ALL, "logprobs"), False),
    ("penalties", {"seed": 8, "repetition_penalty": 1.2, "presence_penalty": 0.5}, ("text_output",), False),
    ("biased", {"temperature": 0, "logit_bias": {"40": 3.0}, "bad_words": ["fox", "a"]}, _ALL, False),
    ("stops", {"seed": 9, "stop": ["\u00fc\u00e4ljsf", "qqqqqq"]}, ("text_output", "output_ids"), False),
    ("grammar", {"seed": 3, "structured_outputs": {"regex": "([a-z]{3} [0-9]{2},){50}"}}, _ALL, False),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, folder = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("hf")
    write_folder(folder)
    (root / "model").mkdir()
    write_graph(root / "graphs", "written", GRAPH)
    write_model(root / "model", "story", folder, max_num_seqs=48, num_blocks=2200)
    write_model(root / "model", "still", folder, max_num_seqs=4, num_blocks=200, migration_limit=0)
    write_model(root / "model", "once", folder, max_num_seqs=4, num_blocks=200, migration_limit=1)
    return root


@pytest.fixture
def replicas(repository: Path) -> Iterator[list[Service]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_service(repository / "model")) for _ in range(3)]


@pytest.fixture
def router(repository: Path, replicas: list[Service]) -> Iterator[Running]:
    with router_over(repository, ",".join(replica.grpc for replica in replicas)) as running:
        yield running


def call_of(index: int, model: str = "story", **more: Any) -> InferCall:
    _, sampling, outputs, is_by_ids = REQUESTS[index % len(REQUESTS)]
    sampling = {"max_tokens": LENGTH, "ignore_eos": True} | sampling | more
    prompt = [np.array([11 + index, 45, 60], np.int32) if is_by_ids else np.array([b"the %d" % index], np.object_)]
    inputs = {"input_ids" if is_by_ids else "text_input": encode(prompt[0])}
    inputs["sampling_parameters"] = encode(np.array([json.dumps(sampling).encode()], np.object_))
    if model != "written":
        inputs["stream"] = encode(np.array([True]))
    wanted = ("text_output", "finish_reason") if model == "written" else outputs
    return InferCall(model, "", f"r{index}", {}, inputs, tuple(RequestedOutput(name, {}) for name in wanted))


class Reader:
    """What one stream brought; ``has_begun`` once so many responses came."""

    def __init__(self, client: V2Client, call: InferCall, after: int = 4) -> None:
        self.outputs: dict[str, Any] = {}
        self.num_responses = 0
        self._after = after
        self.has_begun = asyncio.Event()
        self._call, self._client = call, client

    async def read(self) -> "Reader":
        try:
            async for result in self._client.stream(self._call, timeout_s=120):
                self.num_responses += 1
                arrays = {name: decode(tensor) for name, tensor in result.outputs.items()}
                if "num_previous_tokens" in arrays:  # none twice, none missing
                    assert [len(self.outputs.get("output_ids", []))] == arrays["num_previous_tokens"].tolist()
                for name, array in arrays.items():
                    self._add(name, array)
                if self.num_responses == self._after:
                    self.has_begun.set()
        finally:
            self.has_begun.set()
        return self

    def _add(self, name: str, array: Any) -> None:
        if name == "cumulative_logprob":
            self.outputs[name] = pytest.approx(float(array[0]), rel=1e-5)
        elif name == "logprobs":
            self.outputs.setdefault(name, []).extend(json.loads(array[0]))
        elif name == "text_output":
            self.outputs[name] = self.outputs.get(name, "") + array[0].decode()
        elif name == "finish_reason":
            self.outputs[name] = array[0].decode()
        elif name == "output_ids":
            self.outputs.setdefault(name, []).extend(array.tolist())


async def read_all(router: Running, calls: list[InferCall], killed: list[Service]) -> list[Reader]:
    """What came of each call, while replicas are killed one after another in mid stream."""
    async with V2Client(router.grpc) as client:
        readers = [Reader(client, call, 4) for call in calls]
        tasks = [asyncio.create_task(reader.read()) for reader in readers]
        for replica in killed:
            for reader in readers:
                await reader.has_begun.wait()
            counts = [reader.num_responses for reader in readers]
            replica.process.kill()
            replica.was_killed = True
            wait_until(lambda: replica.process.poll() is not None)  # noqa: B023
            for reader, count in zip(readers, counts, strict=True):  # a few more, wherever they come from
                reader._after = count + 12
                reader.has_begun.clear() if reader.num_responses < reader._after else None
        return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize("model", ["story", "written"])
async def test_streams_go_on_where_their_replica_is_killed(
    model: str, router: Running, replicas: list[Service], repository: Path
) -> None:
    """Text, ids, log probabilities, counts: all equal an undisturbed run's, after two of three replicas have died."""
    calls = [call_of(index, model) for index in range(24) if model == "story" or not REQUESTS[index % 8][3]]
    expected = await read_all(router, calls, [])
    found = await read_all(router, calls, replicas[:2])
    for call, one, other in zip(calls, expected, found, strict=True):
        assert one.outputs == other.outputs, call.request_id
    samples = await asyncio.to_thread(router.scrape)
    assert samples['weft_target_migrated_streams_total{target="model"}'] >= 12
    survivor = replicas[2]
    names = ("weft_llm_running", "weft_llm_waiting", "weft_llm_kv_cache_usage_ratio")
    wait_until(lambda: all(not survivor.figure(name, "story") for name in names))
    await asyncio.sleep(0.3)  # an idle engine checks its blocks, and is lost if they are not all there
    assert expected[0].outputs == (await read_all(router, calls[:1], []))[0].outputs
    assert 0 == survivor.figure("weft_llm_failed_steps_total", "story")


@pytest.mark.parametrize(("model", "num_killed"), [("still", 1), ("once", 2)])
async def test_a_stream_moves_as_often_as_its_model_allows(
    model: str, num_killed: int, router: Running, replicas: list[Service]
) -> None:
    """Then it fails as without."""
    async with V2Client(router.grpc) as client:
        reader = Reader(client, call_of(0, model, max_tokens=1500))
        task = asyncio.create_task(reader.read())
        for number in range(num_killed):
            await asyncio.wait_for(reader.has_begun.wait(), 30)
            [busy] = [one for one in replicas if not one.was_killed and one.figure("weft_llm_running", model)]
            busy.kill()
            if number + 1 < num_killed:
                reader._after = reader.num_responses + 20
                reader.has_begun.clear()
        with pytest.raises(WeftError, match="cannot be reached") as caught:
            await task
        assert "UNAVAILABLE" == caught.value.code
    samples = await asyncio.to_thread(router.scrape)
    assert num_killed - 1 == samples['weft_target_migrated_streams_total{target="model"}']


async def test_what_has_several_choices_does_not_move(router: Running, replicas: list[Service]) -> None:
    """It fails with what its replica was lost by."""
    async with V2Client(router.grpc) as client:
        reader = Reader(client, call_of(0, max_tokens=1500, n=2))
        task = asyncio.create_task(reader.read())
        await asyncio.wait_for(reader.has_begun.wait(), 30)
        next(one for one in replicas if one.figure("weft_llm_running", "story")).kill()
        with pytest.raises(WeftError, match="cannot be reached"):
            await task


async def test_who_leaves_in_the_pause_leaves_nothing(router: Running, replicas: list[Service]) -> None:
    """A deadline passes, or the client goes, while the stream moves or after: no replica works on."""
    async with V2Client(router.grpc) as client:
        for timeout_s in (None, 0.5):
            reader = Reader(client, call_of(0, max_tokens=1500))
            task = asyncio.create_task(reader.read())
            await asyncio.wait_for(reader.has_begun.wait(), 30)
            next(one for one in replicas if not one.was_killed and one.figure("weft_llm_running", "story")).kill()
            if timeout_s is None:
                task.cancel()
            await asyncio.wait((task,), timeout=timeout_s)
            task.cancel()
            await asyncio.wait((task,))
        left = [one for one in replicas if not one.was_killed]
        wait_until(lambda: not any(one.figure("weft_llm_running", "story") for one in left))


def test_openai_clients_see_a_pause_only(router: Running, replicas: list[Service]) -> None:
    """Text, log probabilities and usage of a stream are those of one process."""
    options: dict[str, Any] = {"max_tokens": 400, "seed": 3, "logprobs": 2, "stream_options": {"include_usage": True}}
    with running_gateway(router.grpc) as gateway, openai.OpenAI(base_url=gateway.url, api_key="x") as client:
        answers = []
        for is_killed in (False, True):
            texts, tokens, usage, reason = [], [], None, None
            stream = client.completions.create(
                model="story", prompt="the quick", stream=True, extra_body={"ignore_eos": True}, **options
            )
            for number, chunk in enumerate(stream):
                if number == 10 and is_killed:
                    next(one for one in replicas if one.figure("weft_llm_running", "story")).kill()
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts.append(choice.text)
                    reason = choice.finish_reason or reason
                    tokens += choice.logprobs.tokens if choice.logprobs else []
            assert usage is not None
            answers.append(("".join(texts), tokens, reason, usage.prompt_tokens, usage.completion_tokens))
        assert answers[0] == answers[1]
        assert (400, "length") == (answers[0][4], answers[0][2])
    assert 1 == router.scrape()['weft_target_migrated_streams_total{target="model"}']
