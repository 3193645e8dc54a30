"""``/v1/responses`` and ``/v1/messages`` before a model that says what it is told to, and a language model."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.integration.language_model import running_service, write_folder, write_model
from tests.integration.routing import running_router
from tests.integration.talking import CALLS, PARAMETERS, GatewayProcess, TalkerCore, running_gateway, talking_gateway

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS}, {"type": "function", "name": "now"}]
PATHS = ("/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def core() -> TalkerCore:
    return TalkerCore()


@pytest.fixture(scope="module")
def gateway(core: TalkerCore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with talking_gateway(core, tmp_path_factory.mktemp("graphs")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def body_of(path: str, said: str, /, **fields: Any) -> dict[str, Any]:
    asked = {"input": said} if path == PATHS[0] else {"messages": [{"role": "user", "content": said}], "max_tokens": 99}
    return {"model": "talker", **asked, **fields}


def events_of(gateway: GatewayProcess, path: str, body: dict[str, Any], **headers: str) -> list[tuple[str, Any]]:
    """Name and data of each event, of a stream that is read to its end; the name of the end is ""."""
    connection = http.client.HTTPConnection(gateway.address, timeout=20)
    connection.request(
        "POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json", **headers}
    )
    response = connection.getresponse()
    assert (200, "text/event-stream; charset=utf-8") == (response.status, response.headers["content-type"])
    found = []
    for block in response.read().decode().removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        end = data.removeprefix("data: ")
        found.append((name[0].removeprefix("event: "), json.loads(end)) if name else ("", end))
    connection.close()
    return found


def test_openais_client_reads_a_stream_as_the_whole_answer(client: openai.OpenAI) -> None:
    """Items with the same texts and calls, and the same usage; what came goes back as it came."""
    asked: Any = {"model": "caller", "input": CALLS, "tools": TOOLS}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        final = events.get_final_response()
    assert ["message", "function_call", "function_call"] == [item.type for item in whole.output]
    assert "weather now Let me see. " == whole.output_text == final.output_text
    calls: Any = whole.output[1:]
    assert [("weather", '{"city": "Bonn"}'), ("now", "{}")] == [(call.name, call.arguments) for call in calls]
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    assert (whole.status, whole.usage, whole.store) == (final.status, final.usage, False)
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    history: Any = [{"role": "user", "content": "rain?"}, *(item.to_dict() for item in whole.output), *results]
    raw = client.responses.with_raw_response.create(model="caller", input=history, tools=TOOLS)
    assert 'weather now <tool_call>{"city": "Bonn"}={"city": "Bonn"}<tool_call>{}={}sun' == raw.parse().output_text
    assert raw.headers["x-request-id"] == raw.parse().id
    assert "x-weft-ignored-fields" not in raw.headers


def test_events_of_a_response_are_numbered_and_named(gateway: GatewayProcess) -> None:
    """From ``created`` to ``completed``, with the answer; log probabilities are those of the text's tokens."""
    body = body_of(PATHS[0], "<think> hm </think> yes", model="caller", include=["message.output_text.logprobs"])
    *events, done = events_of(gateway, PATHS[0], body)
    assert ("", "[DONE]") == done
    assert [(data["type"], number) for number, (_, data) in enumerate(events)] == [
        (name, data["sequence_number"]) for name, data in events
    ]
    item = ["output_item.added", "content_part.added"]
    reasoning = [*item, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"]
    text = [*item, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    assert ["created", "in_progress", *reasoning, *text, "completed"] == [
        name.removeprefix("response.") for name, _ in events
    ]
    delta = next(data for name, data in events if name == "response.output_text.delta")
    assert ("yes", [("yes", [])]) == (
        delta["delta"],
        [(one["token"], one["top_logprobs"]) for one in delta["logprobs"]],
    )
    assert {"reasoning_tokens": 3} == events[-1][1]["response"]["usage"]["output_tokens_details"]


def test_events_of_a_message_are_named(gateway: GatewayProcess) -> None:
    """Blocks one after another; the prompt's tokens first, and all at the end."""
    tools = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "now", "input_schema": {"type": "object"}}]
    events = events_of(gateway, PATHS[1], body_of(PATHS[1], CALLS, model="caller", tools=tools))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    names = [name for name, _ in events]
    assert ["message_start", "ping", *block * 3, "message_delta", "message_stop"] == [
        name for index, name in enumerate(names) if name != names[index - 1]
    ]
    assert (16, 0) == tuple(events[0][1]["message"]["usage"][f"{one}put_tokens"] for one in ("in", "out"))
    assert ("tool_use", 16) == (events[-2][1]["delta"]["stop_reason"], events[-2][1]["usage"]["output_tokens"])


def test_a_stop_sequence_is_named(core: TalkerCore, gateway: GatewayProcess) -> None:
    """The model is asked for it where there are some."""
    _, got, headers = gateway.post(PATHS[1], body_of(PATHS[1], "a b END c", stop_sequences=["q", "END"]))
    assert ("stop_sequence", "END") == (got["stop_reason"], got["stop_sequence"])
    assert headers["request-id"] == got["id"] == core.calls[-1].request_id
    _, got, _ = gateway.post(PATHS[1], body_of(PATHS[1], "a b"))
    assert ("end_turn", None) == (got["stop_reason"], got["stop_sequence"])
    assert "stop_reason" not in {output.name for output in core.calls[-1].outputs}


@pytest.mark.parametrize("path", PATHS)
def test_tools_and_a_format_are_either_or(core: TalkerCore, gateway: GatewayProcess, path: str) -> None:
    """The engine gets the calls and the format as alternatives."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form: Any = {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}, "tools": TOOLS}
    if path == PATHS[1]:
        form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        form["tools"] = [{"name": tool["name"], "input_schema": tool.get("parameters", {})} for tool in TOOLS]
    assert 200 == gateway.post(path, body_of(path, "{}", **form) | {"model": "caller"})[0]
    calls, answer = core.sampling()["structured_outputs"]["any_of"]
    assert '"<tool_call>\\n" call' in calls["grammar"]
    assert schema == answer["response_format"]["json_schema"]["schema"]


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_ends_the_call(core: TalkerCore, gateway: GatewayProcess, path: str) -> None:
    """In the middle of a stream, and before a whole answer."""
    for is_stream in (True, False):
        num_calls = len(core.calls)
        connection = http.client.HTTPConnection(gateway.address, timeout=20)
        body = json.dumps(body_of(path, "a b HANG c", stream=is_stream))
        connection.request("POST", path, body, {"content-type": "application/json"})
        if is_stream:
            response = connection.getresponse()
            while b"b " not in response.readline():
                pass
            response.close()
        core.until(lambda num_calls=num_calls: len(core.calls) > num_calls)
        assert 1 == core.num_open
        connection.close()
        core.until(lambda: core.num_open == 0)


@pytest.mark.parametrize("path", PATHS)
def test_errors_have_the_form_of_the_interface(gateway: GatewayProcess, path: str) -> None:
    """With a status before the first event, and as the last event behind it."""
    is_message = path == PATHS[1]
    for word, status, kind in [("FULL", 429, "rate_limit_error"), ("LATE", 504, "timeout_error")]:
        got = gateway.post(path, body_of(path, word, model="plain"))[:2]
        assert 400 == got[0]  # it has no chat template
        status_got, got, _ = gateway.post(path, body_of(path, f"a {word} b"))
        assert status == status_got
        if is_message:
            assert ("error", kind) == (got["type"], got["error"]["type"])
        last, data = events_of(gateway, path, body_of(path, f"a b {word} c"))[-1]
        assert (last, data["type"]) == (("error", "error") if is_message else ("response.failed", "response.failed"))
    late = events_of(gateway, path, body_of(path, "a b HANG c"), **{"x-request-timeout": "0.3"})[-1][1]
    if is_message:
        assert "timeout_error" == late["error"]["type"]
    else:
        assert "server_error" == late["response"]["error"]["code"]
    for body in (b"", b"[]", b"{", b'{"model": "talker"}', b'{"a": ' + b"9" * 5000 + b"}"):
        status_got, got, _ = gateway.post(path, body)
        assert (400, "invalid_request_error") == (status_got, got["error"]["type"])
        assert is_message == (got.get("type") == "error")
    assert 404 == gateway.post(path, body_of(path, "a", model="nobody"))[0]


def test_what_would_need_memory_is_refused_with_the_reason(gateway: GatewayProcess) -> None:
    """There are no responses to look up, to delete or to go on from."""
    for method, below in [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel")]:
        status, got, _ = gateway.ask(method, f"/v1/responses/{below}")
        assert (404, "unknown_url") == (status, got["error"]["code"])
        assert "nothing is kept here" in got["error"]["message"]
    status, got, _ = gateway.ask("GET", "/v1/messages")
    assert (405, "error", "invalid_request_error") == (status, got["type"], got["error"]["type"])


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway before a random language model."""
    root = tmp_path_factory.mktemp("models")
    write_folder(root / "files")
    (root / "files/chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[-1].content }}")
    (root / "repository").mkdir()
    write_model(root / "repository", "writer", root / "files", tool_parser="hermes")
    with (
        running_service(root / "repository") as service,
        running_router(tmp_path_factory.mktemp("no_graphs"), service.grpc) as router,
        running_gateway(router.grpc) as gateway,
    ):
        yield gateway


def test_a_language_model_does_what_it_must(language_model: GatewayProcess) -> None:
    """A forced call, an answer in JSON, and the tokens of a prompt, as many as the answer's usage says."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tools = [{"name": "f", "input_schema": schema}]
    asked = body_of(PATHS[1], "rain?", model="writer", tools=tools, max_tokens=200)
    _, got, _ = language_model.post(
        PATHS[1], {**asked, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    )
    assert [("tool_use", "f")] == [(block["type"], block["name"]) for block in got["content"]], got
    assert 1 <= got["content"][0]["input"]["a"] <= 9
    form = {"type": "json_schema", "name": "a", "schema": schema}
    _, got, _ = language_model.post(PATHS[0], body_of(PATHS[0], "hi", model="writer", text={"format": form}))
    assert 1 <= json.loads(got["output"][0]["content"][0]["text"])["a"] <= 9
    _, got, _ = language_model.post(PATHS[1], {**asked, "max_tokens": 1})
    counted = {name: value for name, value in asked.items() if name != "max_tokens"}
    status, count, _ = language_model.post("/v1/messages/count_tokens", counted)
    assert (200, {"input_tokens": got["usage"]["input_tokens"] + got["usage"]["cache_read_input_tokens"]}) == (
        status,
        count,
    )
    assert "max_tokens" == got["stop_reason"]
