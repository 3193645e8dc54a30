"""The cascade of docs/engines.md: the sample language model, and another engine, Weft's gateway of another mesh."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.integration.routing import naming_service, running_router
from tests.integration.talking import TalkerCore, running_gateway

from weft.mesh.running import running_mesh

GUIDE = Path(__file__).parents[3] / "docs/engines.md"
SURE, UNSURE = "import sys\nimport", "Return a list of"


@pytest.fixture(scope="module")
def core() -> TalkerCore:
    return TalkerCore()


@pytest.fixture(scope="module")
def address(core: TalkerCore, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HTTP of a mesh with the files of the page; the other engine is a gateway of another mesh."""
    config, graph = re.findall(r"```pbtxt\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    root, empty = tmp_path_factory.mktemp("engines"), tmp_path_factory.mktemp("empty")
    for folder in ("model/large/1", "graphs/answer/1"):
        (root / folder).mkdir(parents=True)
    (root / "model/writer").symlink_to(repository / "model/writer")
    # The sample is sure of little: its likeliest tokens have about -3, those of a temperature of 2 below -5.
    (root / "graphs/answer/1/graph.pbtxt").write_text(graph.replace("-2.0 *", "-4.0 *"))
    with (
        naming_service(core) as service,
        running_router(empty, service) as router,
        running_gateway(router.grpc) as other,
        pytest.MonkeyPatch.context() as environment,
    ):
        config = config.replace("http://127.0.0.1:9000/v1", other.url).replace('"writer"', '"talker"')
        (root / "model/large/config.pbtxt").write_text(config)
        environment.setenv("LARGE_API_KEY", "a-key")
        with running_mesh(root, ["--http-port", "0"]) as mesh:
            yield mesh["gateway"].http


@pytest.fixture
def client(address: str, core: TalkerCore) -> Iterator[openai.OpenAI]:
    core.calls.clear()
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
    core.until(lambda: core.num_open == 0)


def complete(client: openai.OpenAI, prompt: str, model: str = "answer", temperature: float = 0) -> str:
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=temperature, seed=1)
    return answer.choices[0].text


def test_the_other_engine_is_asked_in_doubt(client: openai.OpenAI, core: TalkerCore) -> None:
    """And not where the own model is sure; at a temperature of 2 it draws tokens that it holds for unlikely."""
    assert complete(client, SURE, "writer") == complete(client, SURE)
    assert [] == core.calls
    assert f"<s>user:{UNSURE} assistant:" == complete(client, UNSURE, temperature=2)


@pytest.mark.parametrize("order", ["DOWN", "BROKEN", "FULL", "WRONG"])
def test_the_own_model_answers_if_the_other_fails(client: openai.OpenAI, core: TalkerCore, order: str) -> None:
    """UNAVAILABLE after another try."""
    prompt = f"Return {order} of"
    assert complete(client, prompt, "writer", 2) == complete(client, prompt, temperature=2)
    assert (2 if order in ("DOWN", "BROKEN") else 1) == len(core.calls)


def test_a_chat_goes_to_the_other_engine_as_messages(client: openai.OpenAI, core: TalkerCore) -> None:
    """Whose template renders them; streamed, word by word, with usage."""
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a b"}]
    prompt = "<s>system:be kind user:a b assistant:"
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="large", messages=messages, stream=True, stream_options=options))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert prompt == "".join(filter(None, texts))
    assert len(prompt.split()) == sum(map(bool, texts))
    assert (5, 5) == (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)
    got = client.chat.completions.create(model="answer", messages=messages)
    assert (prompt, "stop") == (got.choices[0].message.content, got.choices[0].finish_reason)
    got = client.chat.completions.create(model="large", messages=messages, n=2, logprobs=True, top_logprobs=2)
    assert [prompt, prompt.upper()] == [choice.message.content for choice in got.choices]
    assert ["best", "<s>system:be "] == [one.token for one in got.choices[0].logprobs.content[0].top_logprobs]


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_or_has_no_time_stops_the_other_engine(client: openai.OpenAI, address: str, is_stream: bool) -> None:
    """Across two gateways, routers and an engine; its errors come with their status."""
    body = {"model": "large", "messages": [{"role": "user", "content": "a HANG"}], "stream": is_stream}
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    if is_stream:
        assert 200 == connection.getresponse().status
    connection.close()
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(**body, extra_body={"timeout": 0.5}))
    assert "deadline" in caught.value.message.lower()
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(model="large", messages=[{"role": "user", "content": "a FULL"}])
    assert "1500" == limited.value.response.headers["retry-after-ms"]
