"""Streams of language models whose replicas are killed: they go on at others, and nobody can tell from what came."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.fleet import router_over
from tests.integration.language_model import Answer, Service, Stream, running_service, write_folder, write_model
from tests.integration.talking import running_gateway
from tests.processes import Running, wait_until
from tests.repositories import write_graph

GRAPH = """
name: "written" platform: "graph"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }, { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
node { name: "root" sequence { step { name: "write" model_name: "story" } } }
"""
ALL = ("text_output", "output_ids", "finish_reason", "num_previous_tokens", "cumulative_logprob")
#: Model or graph, prompt, outputs (none: those that come unasked), sampling parameters.
REQUESTS: list[tuple[str, Any, tuple[str, ...], dict[str, Any]]] = [
    ("story", "greedy", (), {}),
    ("story", "seeded", ("text_output", "finish_reason"), {"temperature": 1, "seed": 5, "top_p": 0.9}),
    ("story", [11, 45, 60], (), {"temperature": 1, "seed": 6}),
    ("story", "counted", (*ALL, "logprobs"), {"temperature": 1, "seed": 7, "logprobs": 2, "min_tokens": 150}),
    ("story", "penalties", ("text_output",), {"temperature": 1, "seed": 8, "repetition_penalty": 1.2}),
    ("story", "biased", ALL, {"logit_bias": {"40": 3.0}, "bad_words": ["fox", "a"], "presence_penalty": 0.5}),
    ("story", "stops", ("text_output", "output_ids"), {"temperature": 1, "seed": 9, "stop": ["\u00fc\u00e4", "qqqq"]}),
    ("story", "grammar", ALL, {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2},){50}"}}),
    ("written", "graph", (), {"temperature": 1, "seed": 10}),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, folder = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("hf")
    write_folder(folder)
    (root / "model").mkdir()
    write_graph(root / "graphs", "written", GRAPH)
    write_model(root / "model", "story", folder, max_num_seqs=48, num_blocks=2200)
    write_model(root / "model", "once", folder, max_num_seqs=4, num_blocks=300, migration_limit=1)
    return root


@pytest.fixture
def replicas(repository: Path) -> Iterator[list[Service]]:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        yield list(pool.map(stack.enter_context, [running_service(repository / "model") for _ in range(3)]))


@pytest.fixture
def router(repository: Path, replicas: list[Service]) -> Iterator[Service]:
    with router_over(repository, ",".join(replica.grpc for replica in replicas)) as running:
        yield Service(running.process, {"grpc": running.grpc, "metrics": running.metrics})


def num_moves(router: Running) -> float:
    return router.scrape()['weft_target_migrated_streams_total{target="model"}']


def busy(router: Running, replicas: Sequence[Service]) -> Service:
    """The living replica that has a call of the router."""
    samples = router.scrape()
    name = 'weft_endpoint_inflight{{endpoint="{}",target="model"}}'
    return next(one for one in replicas if not one.was_killed and samples[name.format(one.grpc)])


def read_on(stream: Stream, answers: list[Answer], count: int) -> None:
    """So many responses more, or until the last."""
    for _ in range(count):
        if answers and answers[-1].is_final:
            return
        answers.append(stream.take())


def read_all(router: Service, killed: Sequence[Service] = (), times: int = 3) -> list[dict[str, Any]]:
    """What came of all requests together, while replicas are killed one after another in mid stream."""
    sent = [(Stream(router), number, request) for number in range(times) for request in REQUESTS]
    for stream, number, (model, prompt, outputs, sampling) in sent:
        own = [*prompt, number] if isinstance(prompt, list) else f"{prompt} {number}"
        stream.send(model, own, outputs=outputs, sampling={"max_tokens": 220, "ignore_eos": True} | sampling)
    answers: list[list[Answer]] = [[] for _ in sent]
    for replica in killed:
        for (stream, *_), got in zip(sent, answers, strict=True):
            read_on(stream, got, 8)
        replica.kill()
    for (stream, *_), got in zip(sent, answers, strict=True):
        read_on(stream, got, 10_000)
        stream.close()
    return [joined(got) for got in answers]


def joined(answers: Sequence[Answer]) -> dict[str, Any]:
    """All responses of a stream as one; that none was doubled or is missing is seen from the counts."""
    whole: dict[str, Any] = {"text_output": "", "output_ids": [], "logprobs": [], "error": answers[-1].error}
    for outputs in (answer.outputs for answer in answers):
        if "num_previous_tokens" in outputs:
            assert [len(whole["output_ids"])] == outputs["num_previous_tokens"].tolist()
        whole["text_output"] += outputs["text_output"][0] if "text_output" in outputs else ""
        whole["output_ids"] += outputs["output_ids"].tolist() if "output_ids" in outputs else []
        whole["logprobs"] += json.loads(outputs["logprobs"][0]) if "logprobs" in outputs else []
        whole |= {"end": outputs["finish_reason"]} if "finish_reason" in outputs else {}
        if "cumulative_logprob" in outputs:
            whole["sum"] = pytest.approx(float(outputs["cumulative_logprob"][0]), rel=1e-5)
    return whole


def test_streams_go_on_where_their_replicas_are_killed(router: Service, replicas: list[Service]) -> None:
    """Text, ids, log probabilities and counts equal an undisturbed run's, after two of three replicas have died."""
    expected = read_all(router)
    assert expected == read_all(router, replicas[:2])
    assert num_moves(router) >= len(expected) // 2
    survivor = replicas[2]
    names = ("weft_llm_running", "weft_llm_waiting", "weft_llm_kv_cache_usage_ratio")
    wait_until(lambda: not any(survivor.figure(name, "story") for name in names))
    # An idle engine checks its blocks and slots, and is lost if they are not all there.
    assert expected[: len(REQUESTS)] == read_all(router, times=1)
    assert 0 == survivor.figure("weft_llm_failed_steps_total", "story")


@pytest.mark.long
def test_a_stream_moves_as_often_as_its_model_allows(router: Service, replicas: list[Service]) -> None:
    """Then it fails as without."""
    stream, answers = Stream(router), list[Answer]()
    stream.send("once", "x", sampling={"max_tokens": 1900, "ignore_eos": True})
    for _ in range(2):
        read_on(stream, answers, 5)
        busy(router, replicas).kill()
    read_on(stream, answers, 2000)
    stream.close()
    assert "cannot be reached" in answers[-1].error
    assert 1 == num_moves(router)


@pytest.mark.long
def test_who_leaves_in_the_pause_leaves_nothing(router: Service, replicas: list[Service]) -> None:
    """The client goes as its replica dies; none of the others works on."""
    stream = Stream(router)
    stream.send("story", "x", sampling={"max_tokens": 1500, "ignore_eos": True})
    read_on(stream, [], 5)
    busy(router, replicas).kill()
    stream.close(cancels=True)
    left = [one for one in replicas if not one.was_killed]
    wait_until(lambda: not any(one.figure("weft_llm_running", "story") for one in left))


@pytest.mark.long
def test_openai_clients_see_a_pause_only(router: Service, replicas: list[Service]) -> None:
    """Text, log probabilities and usage of a stream are those of one process."""
    options: dict[str, Any] = {"max_tokens": 400, "seed": 3, "logprobs": 2, "stream_options": {"include_usage": True}}
    answers = []
    with running_gateway(router.grpc) as gateway, openai.OpenAI(base_url=gateway.url, api_key="x") as client:
        for is_killed in (False, True):
            text, tokens, ends, usage = "", [], [], []
            stream = client.completions.create(
                model="story", prompt="the quick", stream=True, extra_body={"ignore_eos": True}, **options
            )
            for number, chunk in enumerate(stream):
                if number == 10 and is_killed:
                    busy(router, replicas).kill()
                usage += [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)] if chunk.usage else []
                for choice in chunk.choices:
                    text += choice.text
                    ends += [choice.finish_reason] if choice.finish_reason else []
                    tokens += choice.logprobs.tokens if choice.logprobs else []
            answers.append((text, tokens, ends, usage))
    assert answers[0] == answers[1]
    assert (["length"], 400, 400) == (answers[0][2], len(tokens), answers[0][3][-1][1])
    assert 1 == num_moves(router)
