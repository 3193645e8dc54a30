"""OpenAI's own client before a gateway process, a router process, and a model that says what it is told to."""

import asyncio
import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration.routing import naming_service, running_router
from tests.integration.talking import GatewayProcess, TalkerCore, running_gateway
from tests.processes import Running, scrape

from weft.base.security.keys import new_key

MODEL = "talker"
USER = [{"role": "user", "content": "a b c"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TalkerCore, str]]:
    core = TalkerCore()
    with naming_service(core) as address:
        yield core, address


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def router(graphs: Path, served: tuple[TalkerCore, str]) -> Iterator[Running]:
    with running_router(graphs, served[1]) as router:
        yield router


@pytest.fixture(scope="module")
def gateway(router: Running) -> Iterator[GatewayProcess]:
    with running_gateway(router.grpc, "--max-body-bytes", "100000", "--forward-header", "X-Client-Id") as gateway:
        yield gateway


@pytest.fixture
def core(served: tuple[TalkerCore, str]) -> Iterator[TalkerCore]:
    """The models; no call of theirs is in work when the test is over."""
    yield served[0]
    served[0].until(lambda: served[0].num_open == 0)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with client_of(gateway) as client:
        yield client


def client_of(gateway: GatewayProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=20)


def test_a_completion_is_whole(core: TalkerCore, client: openai.OpenAI) -> None:
    """Text, reason, usage; 16 tokens if nothing else is said; the id is that of the model's request."""
    got = client.completions.create(model=MODEL, prompt="one two three")
    assert ("one two three", "stop", 0) == (got.choices[0].text, got.choices[0].finish_reason, got.choices[0].index)
    assert (3, 3, 6) == (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens)
    assert ("text_completion", MODEL, core.calls[-1].request_id) == (got.object, got.model, got.id)
    assert {"max_tokens": 16} == core.sampling()
    got = client.completions.create(model=MODEL, prompt="one two three", max_tokens=2)
    assert ("one two", "length") == (got.choices[0].text, got.choices[0].finish_reason)


def test_a_completion_comes_word_by_word(core: TalkerCore, client: openai.OpenAI) -> None:
    """And, for who asks for it, the usage at the end, of no choice."""
    chunks = list(client.completions.create(model=MODEL, prompt="one two three", stream=True))
    assert [("one ", None), ("two ", None), ("three", "stop")] == [
        (chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks
    ]
    assert 1 == len({chunk.id for chunk in chunks})
    options = {"include_usage": True}
    *chunks, last = client.completions.create(model=MODEL, prompt="one two three", stream=True, stream_options=options)
    assert [None] * 3 == [chunk.usage for chunk in chunks]
    assert ([], 3, 3) == (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens)


def test_a_chat_goes_through_the_models_template(core: TalkerCore, client: openai.OpenAI) -> None:
    """Roles, text parts, special tokens, more variables; the model's tokenizer adds no special tokens of its own."""
    messages: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ada"},
    ]
    got = client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"chat_template_kwargs": {"mood": "glad", "messages": "no"}}
    )
    assert "<s>system:be kind user:a\nb assistant:glad" == core.prompt()
    assert "<s>system:be kind user:a b assistant:glad" == got.choices[0].message.content
    (choice,) = got.choices
    assert ("assistant", "stop", "chat.completion") == (choice.message.role, choice.finish_reason, got.object)
    assert {"max_tokens": 2**31 - 1} == core.sampling()
    assert False is core.calls[-1].parameters["add_special_tokens"]


@pytest.mark.parametrize(("extra", "prompt"), [({}, "<\u200bs>"), ({"parse_special_tokens": True}, "<s>")])
def test_special_tokens_of_a_message_are_text_unless_asked_for(
    core: TalkerCore, client: openai.OpenAI, extra: dict[str, Any], prompt: str
) -> None:
    """Those of the template are special in any case; for a completion the model is told."""
    messages: Any = [{"role": "user", "content": "<s>"}]
    client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)
    assert f"<s>user:{prompt} assistant:" == core.prompt()
    assert "parse_special_tokens" not in core.calls[-1].parameters
    client.completions.create(model=MODEL, prompt="<s>", extra_body=extra)
    assert ("<s>", extra.get("parse_special_tokens")) == (
        core.prompt(),
        core.calls[-1].parameters.get("parse_special_tokens"),
    )


def test_a_chat_comes_word_by_word(core: TalkerCore, client: openai.OpenAI) -> None:
    """The role first; the usage last."""
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=USER, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert ["assistant", None, None, None] == [delta.role for delta in deltas]
    assert ["", "<s>user:a ", "b ", "c"] == [delta.content for delta in deltas]
    assert [None, None, None, "length"] == [chunk.choices[0].finish_reason for chunk in chunks]
    assert 3 == last.usage.completion_tokens


def test_several_answers_to_one_prompt(core: TalkerCore, client: openai.OpenAI) -> None:
    """Whole, and each in its own order in a stream; their tokens are counted together, the prompt's once."""
    got = client.completions.create(model=MODEL, prompt="x y", n=2)
    assert [(0, "x y"), (1, "X Y")] == [(choice.index, choice.text) for choice in got.choices]
    assert (2, 4) == (got.usage.prompt_tokens, got.usage.completion_tokens)
    texts = {0: "", 1: ""}
    reasons: dict[int, list[str | None]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(model=MODEL, messages=USER, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index].append(choice.finish_reason)
    assert {0: "<s>user:a b c assistant:", 1: "<S>USER:A B C ASSISTANT:"} == texts
    assert [1, 1] == [reason.count("stop") for reason in reasons.values()]


def test_prompts_of_every_form(core: TalkerCore, client: openai.OpenAI) -> None:
    """Several texts, token ids, several lists of them: choices are numbered through, tokens counted together."""
    got = client.completions.create(model=MODEL, prompt=["a b", "c"], n=2)
    assert ["a b", "A B", "c", "C"] == [choice.text for choice in got.choices]
    assert (3, 6) == (got.usage.prompt_tokens, got.usage.completion_tokens)
    got = client.completions.create(model=MODEL, prompt=[7, 8, 9])
    assert ("7 8 9", 3) == (got.choices[0].text, got.usage.prompt_tokens)
    got = client.completions.create(model=MODEL, prompt=[[1], [2, 3]])
    assert ["1", "2 3"] == [choice.text for choice in got.choices]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model=MODEL, prompt=["a b c", "d e"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert {0: "a b c", 1: "d e"} == texts
    with pytest.raises(openai.BadRequestError, match="takes no token ids"):
        client.completions.create(model="plain", prompt=[7])


def test_sampling_parameters_reach_the_model(core: TalkerCore, client: openai.OpenAI) -> None:
    """Those of OpenAI and those of vLLM, under vLLM's names; priority and salt as parameters of the request."""
    own = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"50": -100.0},
    }
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": False,
        "skip_special_tokens": False,
    }
    got = client.completions.create(
        model=MODEL,
        prompt="a b stop c",
        max_tokens=9,
        stop="stop",
        user="me",
        best_of=1,
        echo=False,
        **own,
        extra_body=extra | {"priority": 3, "cache_salt": "tenant"},
        extra_headers={"x-client-id": "ada"},
    )
    assert ("a b", "stop") == (got.choices[0].text.strip(), got.choices[0].finish_reason)
    assert {"max_tokens": 9, "stop": ["stop"], **own, **extra} == core.sampling()
    parameters = core.calls[-1].parameters
    assert (3, "tenant") == (parameters["priority"], parameters["cache_salt"])
    assert "ada" == core.contexts[-1].headers["x-client-id"]


def test_log_probabilities_in_both_forms(core: TalkerCore, client: openai.OpenAI) -> None:
    """The sampled token is the one whose id came, wherever it is among the best."""
    got = client.completions.create(model=MODEL, prompt="ab cde", logprobs=3).choices[0].logprobs
    assert (["ab ", "cde"], [-0.5, -0.5], [0, 3]) == (got.tokens, got.token_logprobs, got.text_offset)
    assert {"best": -0.25, "ab ": -0.5, "\ufffd": -4.0} == got.top_logprobs[0]
    chunks = client.completions.create(model=MODEL, prompt="ab cde", logprobs=0, stream=True)
    assert [[0], [3]] == [chunk.choices[0].logprobs.text_offset for chunk in chunks]
    got = client.chat.completions.create(
        model=MODEL, messages=USER, max_completion_tokens=1, logprobs=True, top_logprobs=1
    )
    (token,) = got.choices[0].logprobs.content
    assert ("<s>user:a", list(b"<s>user:a"), -0.5) == (token.token, token.bytes, token.logprob)
    assert [("best", -0.25)] == [(top.token, top.logprob) for top in token.top_logprobs]
    assert 1 == core.sampling()["logprobs"]
    got = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    assert [[]] * 4 == [token.top_logprobs for token in got.choices[0].logprobs.content]
    assert client.completions.create(model=MODEL, prompt="a").choices[0].logprobs is None


def test_models_that_have_text_are_listed(core: TalkerCore, client: openai.OpenAI) -> None:
    """One by its name too; the others are not there."""
    assert ["talker", "plain", "caller"] == [model.id for model in client.models.list()]
    assert ("talker", "model") == (client.models.retrieve("talker").id, client.models.retrieve("talker").object)
    for name in ("mute", "nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert "model_not_found" == caught.value.code


def test_a_model_that_cannot_answer_says_why(core: TalkerCore, client: openai.OpenAI) -> None:
    """Unknown: 404. Without text, without a chat template, with a template that refuses or fails: says so."""
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist") as caught:
        client.completions.create(model="nobody", prompt="a")
    assert ("model_not_found", "model", "invalid_request_error") == (
        caught.value.code,
        caught.value.param,
        caught.value.type,
    )
    with pytest.raises(openai.BadRequestError, match="needs the tensors text_input and text_output"):
        client.completions.create(model="mute", prompt="a")
    with pytest.raises(openai.BadRequestError, match="--chat-template plain=FILE") as caught:
        client.chat.completions.create(model="plain", messages=USER)
    assert "no_chat_template" == caught.value.code
    assistant: Any = [{"role": "assistant", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="the chat template refuses: begin with the user"):
        client.chat.completions.create(model=MODEL, messages=assistant)
    with pytest.raises(openai.InternalServerError, match=r"chat template failed \(error id \w+\)") as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "oops"}])
    assert "append" not in str(caught.value)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


#: What no line of ``bodies.txt`` can hold.
LONG_BODIES = [
    (COMPLETIONS, 400, "not UTF-8 at byte 0", b"\xff{}"),
    (COMPLETIONS, 400, "too many digits", b'{"seed": ' + b"9" * 5000 + b"}"),
    (COMPLETIONS, 400, "nested too deeply", b"[" * 50_000),
    (COMPLETIONS, 413, "at most 100000 are taken", {"prompt": "x" * 100_000}),
    (COMPLETIONS, 400, "192; at most 128", {"prompt": ["a"] * 64, "model": MODEL, "n": 3}),
]
LINES = [
    line.split(" | ") for line in Path(__file__).with_name("bodies.txt").read_text().splitlines() if line[0] != "#"
]
BODIES = [(path, int(status), message, body.encode()) for path, status, message, body in LINES] + LONG_BODIES


@pytest.mark.parametrize(("path", "status", "message", "body"), BODIES, ids=[message for _, _, message, _ in BODIES])
def test_what_is_wrong_with_a_body_is_said(
    gateway: GatewayProcess, path: str, status: int, message: str, body: Any
) -> None:
    """In OpenAI's form, before anything is called."""
    got_status, got, _ = gateway.post(path, body)
    assert (status, "invalid_request_error") == (got_status, got["error"]["type"])
    assert {"message", "type", "param", "code"} == got["error"].keys()
    assert message in got["error"]["message"]


def test_harmless_values_of_unsupported_fields_pass(core: TalkerCore, gateway: GatewayProcess) -> None:
    """They and unknown fields are listed, of a stream too; a form that a foreign page can send unasked is refused."""
    body = {
        "model": MODEL, "messages": USER, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "n": None, "stream": False, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "stop": [],
        "structured_outputs": None, "logit_bias": {}, "stream_options": None, "temprature": 1, "": 1,
    }  # fmt: skip
    expected = {"store", "metadata", "service_tier", "temprature", "messages[].x", "?"}
    body["messages"] = [{**USER[0], "x": 1}] * 2
    status, _, headers = gateway.post(CHAT, body)
    assert (200, expected) == (status, set(headers["x-weft-ignored-fields"].split(", ")))
    with openai.OpenAI(base_url=gateway.url, api_key="none") as client:
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt="a", best_of=1, stream=True, extra_body={"new": 1}
        )
    assert "new" == raw.headers["x-weft-ignored-fields"]
    assert 415 == gateway.post(CHAT, body, content_type="text/plain")[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("word", "error", "code"),
    [
        ("FULL", openai.RateLimitError, "rate_limit_exceeded"),
        ("WRONG", openai.BadRequestError, None),
        ("DOWN", openai.InternalServerError, "unavailable"),
        ("LATE", openai.InternalServerError, "deadline_exceeded"),
        ("BROKEN", openai.InternalServerError, "internal_error"),
        ("ODD", openai.InternalServerError, "internal_error"),
    ],
)
def test_failures_of_the_model_have_their_status(
    core: TalkerCore, client: openai.OpenAI, word: str, error: type[openai.APIStatusError], code: str, is_stream: bool
) -> None:
    """Also of a stream, as long as nothing of it was sent; what the model's defect was stays in the log."""
    with pytest.raises(error) as caught:
        client.completions.create(model=MODEL, prompt=word, stream=is_stream)
    assert code == caught.value.code
    status = {"FULL": 429, "WRONG": 400, "DOWN": 503, "LATE": 504}.get(word, 500)
    assert status == caught.value.status_code
    assert "secret" not in str(caught.value)
    headers = caught.value.response.headers
    expected = ("2", "1500") if word == "FULL" else (None, None)
    assert expected == (headers.get("retry-after"), headers.get("retry-after-ms"))


def test_a_failure_in_mid_stream_is_an_event(core: TalkerCore, client: openai.OpenAI) -> None:
    """What came before it was sent; the client raises what it says."""
    stream = iter(client.completions.create(model=MODEL, prompt="a b FULL", stream=True))
    assert ["a ", "b "] == [next(stream).choices[0].text for _ in range(2)]
    with pytest.raises(openai.APIError, match="the queue is full") as caught:
        next(stream)
    assert "rate_limit_exceeded" == caught.value.code
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt=["a", "HANG", "FULL"])


def test_who_leaves_withdraws_the_request(core: TalkerCore, gateway: GatewayProcess, client: openai.OpenAI) -> None:
    """In mid stream, before the first word, and while a whole answer is waited for; of several prompts too."""
    stream = client.completions.create(model=MODEL, prompt=["a HANG", "HANG"], stream=True)
    assert "a " == next(iter(stream)).choices[0].text
    core.until(lambda: core.num_open == 2)
    stream.close()
    core.until(lambda: core.num_open == 0)
    for is_stream in (True, False):
        connection = http.client.HTTPConnection(gateway.address)
        body = json.dumps({"model": MODEL, "prompt": "HANG", "stream": is_stream})
        connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
        core.until(lambda: core.num_open == 1)
        connection.close()
        core.until(lambda: core.num_open == 0)


def test_a_request_has_a_time(core: TalkerCore, gateway: GatewayProcess, client: openai.OpenAI) -> None:
    """By a field or a header, the shorter one; no client repeats what had its time."""
    for extra in (
        {"extra_body": {"timeout": 0.2}},
        {"extra_headers": {"x-request-timeout": "0.2"}},
        {"extra_body": {"timeout": 0}},
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="HANG", **extra)
        assert (504, "deadline_exceeded") == (caught.value.status_code, caught.value.code)
        assert "false" == caught.value.response.headers["x-should-retry"]
    status, got, _ = gateway.post(COMPLETIONS, {"model": MODEL, "prompt": "a"}, x_request_timeout="soon")
    assert (400, True) == (status, "must be a number of seconds" in got["error"]["message"])


async def test_many_at_once(core: TalkerCore, gateway: GatewayProcess) -> None:
    """Of the asynchronous client: streams and whole answers, each its own."""
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:

        async def streamed(name: str) -> str:
            stream = await client.completions.create(model=MODEL, prompt=f"{name} says it", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(name: str) -> str:
            got = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": name}])
            return str(got.choices[0].message.content)

        names = [f"name{number}" for number in range(20)]
        assert [f"{name} says it" for name in names] == await asyncio.gather(*map(streamed, names))
        assert [f"<s>user:{name} assistant:" for name in names] == await asyncio.gather(*map(whole, names))


def test_keys_are_the_routers_to_check(graphs: Path, served: tuple[TalkerCore, str], tmp_path: Path) -> None:
    """None or a wrong one: 401. A model that a key does not allow: 403, and not listed."""
    key, line = new_key("ada")
    keys = tmp_path / "weft.keys"
    keys.write_text(json.dumps(json.loads(line) | {"models": ["plain"]}) + "\n")
    with (
        running_router(graphs, served[1], ["--auth-keys", str(keys)]) as router,
        running_gateway(router.grpc) as gateway,
    ):
        with client_of(gateway, key) as client:
            assert "a" == client.completions.create(model="plain", prompt="a").choices[0].text
            assert ["plain"] == [model.id for model in client.models.list()]
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(model=MODEL, prompt="a")
        with client_of(gateway, "wrong") as client:
            for ask in (client.models.list, lambda: client.completions.create(model="plain", prompt="a")):
                with pytest.raises(openai.AuthenticationError) as caught:
                    ask()
                assert ("invalid_api_key", "Bearer") == (
                    caught.value.code,
                    caught.value.response.headers["www-authenticate"],
                )
        assert 401 == gateway.post(COMPLETIONS, {"model": "plain", "prompt": "a"})[0]
        assert (200, {"status": "ok"}) == gateway.ask("GET", "/health")[:2]


def test_a_router_that_goes_and_comes_back(graphs: Path, served: tuple[TalkerCore, str], core: TalkerCore) -> None:
    """503 meanwhile, for `/health` too; a stream that it takes with it ends with an event."""
    with (
        running_router(graphs, served[1]) as router,
        running_gateway(router.grpc) as gateway,
        client_of(gateway) as client,
    ):
        stream = iter(client.completions.create(model=MODEL, prompt="a HANG", stream=True))
        next(stream)
        router.kill()
        with pytest.raises(openai.APIError, match="cannot be reached"):
            next(stream)
        with pytest.raises(openai.InternalServerError, match="the router cannot be reached") as caught:
            client.completions.create(model="plain", prompt="a")
        assert (503, "unavailable") == (caught.value.status_code, caught.value.code)
        assert 503 == gateway.ask("GET", "/health")[0]
        port = router.grpc.rpartition(":")[2]
        with running_router(graphs, served[1], ["--grpc-port", port]):
            patient = client.with_options(max_retries=10)
            assert "a" == patient.completions.create(model=MODEL, prompt="a").choices[0].text


def test_a_gateway_that_stops_tells_its_clients(router: Running, core: TalkerCore, otlp_collector: Any) -> None:
    """What ends within the grace ends well; what does not is told so and withdrawn; exit status 0.

    Each request is a span, and part of its client's trace; that of one that ended badly says why.
    """
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    parent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    with running_gateway(router.grpc, "--grace-s", "1") as gateway, client_of(gateway) as client:
        stream = iter(client.completions.create(model=MODEL, prompt="a HANG", stream=True, extra_headers=parent))
        next(stream)
        assert core.contexts[-1].headers["traceparent"].startswith(f"00-{trace_id}-")
        gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the gateway stops") as caught:
            next(stream)
        assert "unavailable" == caught.value.code
        assert 0 == gateway.process.wait(10)
        core.until(lambda: core.num_open == 0)
    (span,) = otlp_collector.wait_for(lambda spans: spans)
    assert (f"text_completion {MODEL}", "SERVER", trace_id) == (span.name, span.kind, span.trace_id)
    assert ("ERROR", 200) == (span.status, span.attributes["http.response.status_code"])


def test_routers_of_one_name_take_turns() -> None:
    """As those behind a name in a cluster: each answers some requests, and all stand for one address."""
    cores = TalkerCore(), TalkerCore()
    with naming_service(cores[0]) as first, naming_service(cores[1]) as second:
        with running_gateway(f"ipv4:{first},{second}") as gateway, client_of(gateway) as client:
            for core in cores:
                for _ in range(50):  # a router is in the round as soon as it is connected
                    client.completions.create(model=MODEL, prompt="a")
                    if core.calls:
                        break
        assert all(core.calls for core in cores)


def test_requests_are_counted(core: TalkerCore, gateway: GatewayProcess, client: openai.OpenAI) -> None:
    """By endpoint and status, beside those whose client left."""
    client.completions.create(model=MODEL, prompt="a")
    gateway.post("/v1/elsewhere", {})
    samples = scrape(gateway.metrics)
    assert samples['weft_gateway_requests_total{endpoint="/v1/completions",status="200"}'] >= 1
    assert samples['weft_gateway_requests_total{endpoint="/other",status="404"}'] >= 1
    assert samples["weft_gateway_inflight"] == 0
    assert samples["weft_event_loop_lag_seconds_count"] > 0


def test_load_balancers_may_look_at_the_port_of_http(router: Running) -> None:
    """With ``--probes`` health and metrics are there too; without it they are not."""
    with running_gateway(router.grpc, "--probes") as gateway:
        assert (200, {"status": "ok"}) == gateway.ask("GET", "/ping")[:2]
        assert "weft_gateway_inflight" in scrape(gateway.address)
    with running_gateway(router.grpc) as gateway:
        assert [404, 404] == [gateway.ask("GET", path)[0] for path in ("/ping", "/metrics")]


def test_an_endpoint_picker_reads_what_models_count_at_the_port_of_http(router: Running) -> None:
    """``--metrics-from``: the families of a service's models, not those of the service."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'vllm:num_requests_waiting{engine="0"} 3.0\nweft_llm_waiting 3.0\n')

    with HTTPServer(("127.0.0.1", 0), Page) as pages, ThreadPoolExecutor(1) as thread:
        thread.submit(pages.serve_forever, 0.01)
        source = f"--metrics-from=http://127.0.0.1:{pages.server_port}/metrics"
        with running_gateway(router.grpc, "--probes", source) as gateway:
            samples = scrape(gateway.address)
        pages.shutdown()
    assert samples['vllm:num_requests_waiting{engine="0"}'] == 3
    assert "weft_llm_waiting" not in samples
