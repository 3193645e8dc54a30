"""Language models from end to end: tritonclient, a model service process, and transformers as the oracle."""

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.language_model import (
    MAX_LEN,
    POISON_ID,
    TIMEOUT_S,
    VOCAB_SIZE,
    Service,
    Stream,
    ask,
    inputs_of,
    running_service,
    write_folder,
    write_model,
)
from tests.messages import result_from_response
from tests.processes import wait_until
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft.base.statistics import GEN_AI_FIRST_TOKEN_BUCKETS_S, VLLM_REQUEST_BUCKETS_S, VLLM_TOKEN_BUCKETS_S
from weft.base.tensors import decode, split_bytes
from weft.v2.client.channels import channel_options
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

PROMPTS = ("the quick brown fox", "Sylter Deich, größer", "x")
#: Runs for seconds, unless something ends it.
LONG = {"max_tokens": 1800, "ignore_eos": True}
#: Runs for long enough to be met while it does.
MEDIUM = {"max_tokens": 500, "ignore_eos": True}
LEVELS = "dynamic_batching {{ priority_levels: 2 default_priority_level: 2 {} }}"
NUM_QUEUED = 2_000
#: Unary calls that are sent at once, a part of all; of more than 1000 that no servicer has begun with, gRPC itself
#: drops some.
NUM_IN_FLIGHT = 500
#: More of them than ``narrow`` can answer while the others are sent.
NUM_SERVED = 20
MODELS = ("tiny", "narrow", "ids")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf")
    write_folder(folder)
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def repository(folder: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    """``tiny`` runs 8 sequences, ``narrow`` one, before a queue of two levels; ``ids`` has no tokenizer.

    The first two are in one process, and then in two ranks each.
    """
    ranks = {"tensor_parallel_size": request.param}
    root = tmp_path_factory.mktemp("repository")
    bare = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).symlink_to(folder / name)
    policy = f"default_queue_policy {{ max_queue_size: {NUM_QUEUED} }}"
    write_model(
        root, "tiny", folder, LEVELS.format(""), max_num_seqs=8, num_blocks=1100, max_text_bytes=100_000, **ranks
    )
    write_model(root, "narrow", folder, LEVELS.format(policy), max_num_seqs=1, num_blocks=400, **ranks)
    write_model(root, "ids", bare, max_num_seqs=4, num_blocks=400, metric_names="vllm,gen_ai")
    return root


#: For what must happen within a time: two ranks on two busy cores may take longer.
in_time = pytest.mark.parametrize("repository", [1], indirect=True)


@pytest.fixture(scope="module")
def running(repository: Path) -> Iterator[Service]:
    """The service."""
    with running_service(repository) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """The service; when the test is over no request is in it, and every block of every cache is free."""
    yield running
    wait_until(lambda: all(is_quiet(running, model) for model in MODELS))


def is_quiet(service: Service, model: str) -> bool:
    """Whether no sequence runs or waits, and none owns a block; a model that is not loaded is quiet."""
    figures = {key: value for key, value in service.scrape().items() if f'model="{model}"' in key}
    names = (
        "weft_llm_running",
        "weft_llm_waiting",
        "weft_llm_kv_cache_usage_ratio",
        "nv_inference_pending_request_count",
    )
    return not any(value for key, value in figures.items() if key.startswith(names))


@pytest.fixture
def stream(service: Service) -> Iterator[Stream]:
    """A stream; what is still in work when the test is over is cancelled."""
    stream = Stream(service)
    yield stream
    stream.close(cancels=True)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[[list[int], int], list[int]]:
    """``oracle(prompt_ids, num_tokens)``: how transformers goes on."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)

    def go_on(ids: list[int], num_tokens: int) -> list[int]:
        with torch.inference_mode():
            answer = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=num_tokens,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return list(answer[0, len(ids) :].tolist())

    return go_on


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    """That of the models."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_text_has_the_form_that_is_asked_for(service: Service) -> None:
    """Asked for in JSON or by a request parameter; a form that cannot be, and a model without a tokenizer, refuse."""
    sampling = {"max_tokens": 60, "temperature": 1, "structured_outputs": {"regex": "[a-c]{3}(-[0-9]{2}){2}"}}
    for _ in range(3):
        answer = ask(
            service, "tiny", "x", ["text_output", "finish_reason"], sampling=sampling, exclude_input_in_output=True
        )
        assert re.fullmatch("[a-c]{3}(-[0-9]{2}){2}", answer.text)
        assert ["stop"] == answer.outputs["finish_reason"]
    stream = Stream(service)
    stream.send("tiny", "x", sampling=sampling | {"n": 2})
    texts = [
        "".join(texts)
        for texts in zip(*(one.outputs.get("text_output", ["", ""]) for one in stream.rest()), strict=True)
    ]
    stream.close()
    assert all(re.fullmatch("[a-c]{3}(-[0-9]{2}){2}", text) for text in texts)
    for model, outputs, words in (
        ("tiny", {"json": {"properties": {"a": {"not": {}}}}}, "at #/properties/a cannot be a grammar"),
        ("ids", {"regex": "a"}, "the model's folder has no tokenizer"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            ask(service, model, [5], sampling={"structured_outputs": outputs})
    assert 2 <= service.figure("weft_llm_grammar_compile_seconds_count", "tiny")
    assert 1 == service.figure("weft_llm_grammar_failures_total", "tiny")


def test_streams_unary_calls_and_transformers_agree(
    service: Service, tokenizer: Any, oracle: Callable[[list[int], int], list[int]]
) -> None:
    """Of several prompts at once, by text and by ids: the same tokens, and the same text from pieces and as a whole."""
    sampling = {"max_tokens": 40, "ignore_eos": True}
    names = ("text_output", "output_ids", "num_output_tokens")
    stream = Stream(service)
    for prompt in PROMPTS:
        stream.send("tiny", prompt, prompt, names, sampling=sampling)
    pieces: dict[str, list[Any]] = {prompt: [] for prompt in PROMPTS}
    while not all(got and got[-1].is_final for got in pieces.values()):
        answer = stream.take()
        pieces[answer.request_id].append(answer)
    stream.close()
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        expected = oracle(ids, 40)
        streamed = [token_id for answer in pieces[prompt] for token_id in answer.outputs["output_ids"].tolist()]
        assert expected == streamed
        whole = ask(service, "tiny", prompt, names, sampling=sampling)
        assert expected == whole.outputs["output_ids"].tolist()
        assert 40 == whole.outputs["num_output_tokens"][0]
        assert whole.text == prompt + "".join(answer.text for answer in pieces[prompt])
        assert whole.text == prompt + tokenizer.decode(expected)
        assert expected == ask(service, "ids", ids, sampling=sampling).outputs["output_ids"].tolist()


@pytest.mark.parametrize(
    ("model", "prompt", "options", "message"),
    [
        ("tiny", None, {}, "must be given, got neither"),
        ("tiny", "y" * 100_001, {}, "has 100001 bytes; at most 100000 are allowed"),
        ("tiny", [VOCAB_SIZE], {}, f"token ids of this model are 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ("tiny", [5] * MAX_LEN, {}, f"prompt has {MAX_LEN} tokens"),
        ("tiny", "x", {"sampling": {"temprature": 1}}, "unknown sampling parameter 'temprature'"),
        ("tiny", "x", {"sampling": {"n": 9}}, "n must be at most 8"),
        ("tiny", "x", {"outputs": ["text"]}, "unexpected inference output 'text'"),
        ("ids", "x", {}, "'text_input' needs a tokenizer"),
    ],
)
def test_a_bad_request_is_refused(service: Service, model: str, prompt: Any, options: Any, message: str) -> None:
    """INVALID_ARGUMENT with the value got and the values allowed."""
    with pytest.raises(InferenceServerException) as error:
        ask(service, model, prompt, **options)
    assert "StatusCode.INVALID_ARGUMENT" == error.value.status()
    assert message in error.value.message()


def test_a_bad_request_ends_no_stream(stream: Stream) -> None:
    """The next one on it is answered."""
    stream.send("tiny", "x", sampling={"n": 9})
    assert "sampling parameter n must be at most 8" in stream.take().error
    stream.send("tiny", "x")
    assert stream.rest()[-1].is_final


@in_time
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
def test_who_leaves_frees_everything(service: Service, how: str) -> None:
    """Streams in work and requests that wait for a slot; the fixture looks at the blocks."""
    stream = Stream(service, **({"stream_timeout": 0.5} if how == "deadline" else {}))
    for number in range(4):
        stream.send("narrow", "the quick", str(number), sampling=LONG)
    assert not stream.take().error
    if how == "deadline":
        while not (error := stream.take().error):
            pass
        assert "DEADLINE_EXCEEDED" in error or "the deadline passed" in error  # the client's clock, or the service's
    if how == "disconnect":
        stream.client._client_stub = None
        stream.client._channel.close()
    stream.close(cancels=True)


def test_a_deadline_passes_in_the_queue(service: Service, stream: Stream) -> None:
    """One that waits is answered when it passes, and never begins."""
    for number in range(2):  # a slot and one in reserve
        stream.send("narrow", "x", str(number), sampling=LONG)
    stream.take()
    began = service.figure("nv_inference_exec_count", "narrow")
    with pytest.raises(InferenceServerException) as error:
        ask(service, "narrow", "x", client_timeout=0.2)
    assert "StatusCode.DEADLINE_EXCEEDED" == error.value.status()
    wait_until(lambda: not service.figure("nv_inference_pending_request_count", "narrow"))
    assert began == service.figure("nv_inference_exec_count", "narrow")


@in_time
def test_a_better_priority_overtakes(service: Service, stream: Stream) -> None:
    """It enters the full engine at once, a worse one steps aside and goes on later with the same text."""
    expected = ask(service, "narrow", "x", sampling=MEDIUM, exclude_input_in_output=True).text
    preemptions = service.figure("weft_llm_preemptions_total", "narrow")
    for name in ("low", "low 2"):
        stream.send("narrow", "x", name, sampling=MEDIUM, priority=2, stream=False, exclude_input_in_output=True)
    wait_until(lambda: service.figure("weft_llm_running", "narrow") == 1)
    stream.send("narrow", "Deich", "high", sampling={"max_tokens": 4}, priority=1, stream=False)
    answers = [stream.take() for _ in range(3)]
    assert ["high", "low", "low 2"] == [answer.request_id for answer in answers]
    assert [expected] * 2 == [answer.text for answer in answers[1:]]
    assert preemptions + 1 == service.figure("weft_llm_preemptions_total", "narrow")


def test_metrics_have_the_names_of_others_too(service: Service) -> None:
    """With the same values, by their labels; of a model that asks for it."""
    ask(service, "ids", [5, 6])
    figures = service.scrape()
    for ours, theirs, labels in [
        ("weft_llm_generation_tokens_total", "vllm:generation_tokens_total", 'model_name="ids"'),
        ("weft_llm_prompt_tokens_total", "vllm:prefix_cache_queries_total", 'model_name="ids"'),
        (
            "weft_llm_request_seconds_count",
            "gen_ai_server_request_duration_seconds_count",
            'gen_ai_request_model="ids"',
        ),
        ("weft_llm_request_seconds_sum", "vllm:e2e_request_latency_seconds_sum", 'model_name="ids"'),
        ("weft_llm_running", "vllm:num_requests_running", 'model_name="ids"'),
    ]:
        (value,) = [one for key, one in figures.items() if key.startswith(theirs + "{") and labels in key]
        assert service.figure(ours, "ids") == value
    reasons = [key for key in figures if key.startswith("vllm:request_success_total{")]
    assert any('finished_reason="length"' in key for key in reasons)
    assert not any("tiny" in key for key in figures if key.startswith(("vllm:", "gen_ai_")))
    for name, instance, bounds in [
        ("vllm:inter_token_latency_seconds", True, VLLM_TOKEN_BUCKETS_S),
        ("vllm:request_queue_time_seconds", True, VLLM_REQUEST_BUCKETS_S),
        ("gen_ai_server_time_to_first_token_seconds", False, GEN_AI_FIRST_TOKEN_BUCKETS_S),
    ]:
        buckets = [key for key in figures if key.startswith(name + "_bucket{")]
        assert [*map(str, bounds), "+Inf"] == [re.findall(r'le="([^"]*)"', key)[0] for key in buckets]
        assert all(instance == ('engine="' in key) for key in buckets)
    assert all('engine="' in key for key in figures if key.startswith("vllm:"))


async def test_a_long_queue(service: Service) -> None:
    """As many wait as may; those beyond are refused with a hint; a cancel takes all away."""
    (request,) = requests_of("narrow", "x", LONG)
    async with grpc.aio.insecure_channel(service.grpc, options=channel_options()) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        calls: list[Any] = []
        while len(calls) < NUM_QUEUED:
            calls += [infer(request) for _ in range(NUM_IN_FLIGHT)]
            await asyncio.to_thread(wait_until, partial(has_queued, service, len(calls) - NUM_SERVED))
        beyond = [infer(request) for _ in range(2 * NUM_SERVED)]
        calls += beyond
        await asyncio.wait([asyncio.ensure_future(call.code()) for call in beyond[-NUM_SERVED:]])
        refused = beyond[-NUM_SERVED:]
        assert {grpc.StatusCode.RESOURCE_EXHAUSTED} == {await call.code() for call in refused}
        assert f"{NUM_QUEUED} requests wait at priority level 2" in await refused[0].details()
        assert "retry-after-ms" in dict(await refused[0].trailing_metadata())
        for call in calls:
            call.cancel()
        await asyncio.to_thread(wait_until, lambda: is_quiet(service, "narrow"))


def has_queued(service: Service, count: int) -> bool:
    """Whether so many requests wait before ``narrow``, or more."""
    return service.figure("nv_inference_pending_request_count", "narrow") >= count


def requests_of(model: str, prompt: Any, sampling: Any, **flags: Any) -> list[pb.ModelInferRequest]:
    """The request as a message."""
    request = pb.ModelInferRequest(model_name=model)
    for tensor in inputs_of(prompt, sampling=sampling, **flags):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    return [request]


@in_time
async def test_a_slow_reader_gets_fewer_and_longer_responses(service: Service) -> None:
    """All its text comes; meanwhile others are answered, and its work is done before it reads on."""
    sampling = LONG | {"max_tokens": 800, "logprobs": 20}
    requests = requests_of("tiny", "x", sampling, stream=True, return_logprobs=True, return_num_output_tokens=True)
    options = [*channel_options(), ("grpc.http2.bdp_probe", 0)]  # else the connection itself keeps megabytes
    async with grpc.aio.insecure_channel(service.grpc, options=options) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests), timeout=TIMEOUT_S)
        responses = [await call.read()]
        other = await asyncio.to_thread(ask, service, "tiny", "x", ["output_ids"], sampling={"ignore_eos": True})
        assert 8 == len(other.outputs["output_ids"])
        await asyncio.to_thread(wait_until, lambda: service.figure("weft_llm_running", "tiny") == 0)
        while not responses[-1].infer_response.parameters["triton_final_response"].bool_param:
            responses.append(await call.read())
        call.cancel()
    outputs = [result_from_response(response.infer_response).outputs for response in responses]
    counts = [int(decode(each["num_output_tokens"])[0]) for each in outputs]
    assert 800 == sum(counts)
    assert len(counts) < 400, len(counts)
    text = b"".join(split_bytes(each["text_output"].data)[0] for each in outputs)
    whole = await asyncio.to_thread(ask, service, "tiny", "x", sampling=sampling, exclude_input_in_output=True)
    assert whole.text == text.decode()


def test_a_failed_step_is_that_of_its_requests(service: Service) -> None:
    """INTERNAL with an error id; what came before it and what comes after it is answered."""
    good = ask(service, "ids", [5, 6])
    failed = service.figure("weft_llm_failed_steps_total", "ids")
    with pytest.raises(InferenceServerException) as error:
        ask(service, "ids", [POISON_ID])
    assert "StatusCode.INTERNAL" == error.value.status()
    assert "a step of the model failed (error id " in error.value.message()
    assert failed + 1 == service.figure("weft_llm_failed_steps_total", "ids")
    assert good.outputs["output_ids"].tolist() == ask(service, "ids", [5, 6]).outputs["output_ids"].tolist()


def test_prefixes_are_shared_unless_salted(service: Service) -> None:
    """By requests with the same salt alone."""

    def num_hits(**options: Any) -> float:
        before = service.figure("weft_llm_prefix_cache_hit_tokens_total", "ids")
        ask(service, "ids", list(range(10, 60)), **options)
        return service.figure("weft_llm_prefix_cache_hit_tokens_total", "ids") - before

    salted = {"parameters": {"cache_salt": "tenant"}}
    assert [0, 48, 0, 48] == [num_hits(), num_hits(), num_hits(**salted), num_hits(**salted)]


def test_a_model_changes_under_a_stream(service: Service, stream: Stream) -> None:
    """A reload, and an unload that waits: each stream ends as if nothing had been."""
    expected = ask(service, "ids", [5], sampling=MEDIUM).outputs["output_ids"].tolist()
    with triton.InferenceServerClient(service.grpc) as client, ThreadPoolExecutor(1) as pool:
        for change in (client.load_model, client.unload_model):
            stream.send("ids", [5], sampling=MEDIUM)
            ids = stream.take().outputs["output_ids"].tolist()
            changing = pool.submit(change, "ids")
            ids += [token_id for answer in stream.rest() for token_id in answer.outputs["output_ids"].tolist()]
            assert expected == ids
            changing.result(TIMEOUT_S)
        with pytest.raises(InferenceServerException):
            ask(service, "ids", [5])
        client.load_model("ids")
    assert expected == ask(service, "ids", [5], sampling=MEDIUM).outputs["output_ids"].tolist()


def test_figures(service: Service) -> None:
    """Of latencies, tokens and outcomes, by model."""
    before = service.scrape()
    ask(service, "tiny", "x", sampling={"max_tokens": 4, "ignore_eos": True})
    after = service.scrape()
    labels = 'model="tiny",version="1"'
    grown = {key: after[key] - before.get(key, 0) for key in after if labels in key and key.startswith("weft_llm")}
    assert 4 == grown[f"weft_llm_generation_tokens_total{{{labels}}}"]
    for name, count in {
        "time_to_first_token_seconds": 1, "time_per_output_token_seconds": 1, "inter_token_latency_seconds": 3,
        "queue_seconds": 1, "request_seconds": 1,
    }.items():  # fmt: skip
        assert count == grown[f"weft_llm_{name}_count{{{labels}}}"], name
    outcome = 'weft_llm_requests_total{model="tiny",outcome="length",version="1"}'
    assert 1 == after[outcome] - before.get(outcome, 0)
    assert 1 == grown[f"weft_llm_good_requests_total{{{labels}}}"]
