"""OpenAI's own client with tools and reasoning, before a model that says what it is told to."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.integration.language_model import running_service, write_folder, write_model
from tests.integration.routing import running_router
from tests.integration.talking import CALLS, PARAMETERS, GatewayProcess, TalkerCore, running_gateway, talking_gateway

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


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


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    """The answer of a model that says ``text``."""
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(messages=messages, **{"model": "caller", "tools": TOOLS, **given})


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_are_taken_out_of_the_text(core: TalkerCore, client: openai.OpenAI) -> None:
    """The template has the tools; the answer their calls, with an id each, and the text before them."""
    (choice,) = ask(client, CALLS).choices
    assert [("weather", {"city": "Bonn"}), ("now", {})] == calls_of(choice.message)
    assert 2 == len({call.id for call in choice.message.tool_calls})
    assert {"function"} == {call.type for call in choice.message.tool_calls}
    assert "tool_calls" == choice.finish_reason
    assert "weather now Let me see. " == choice.message.content
    (choice,) = ask(client, CALLS, parallel_tool_calls=False).choices
    assert [("weather", {"city": "Bonn"})] == calls_of(choice.message)
    (choice,) = ask(client, "no call", n=2).choices[1:]
    assert (None, "stop", "WEATHER NOW NO CALL") == (
        choice.message.tool_calls,
        choice.finish_reason,
        choice.message.content,
    )


def test_calls_are_streamed(client: openai.OpenAI) -> None:
    """Text as it comes; of a call first index, id, type and name, then its arguments; the reason last."""
    chunks = list(ask(client, CALLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "weather now Let me see. " == "".join(delta.content or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [0, 0, 0, 1, 1] == [call.index for call in calls]
    assert ["weather", None, None, "now", None] == [call.function.name for call in calls]
    assert [True, False, False, True, False] == [bool(call.id and call.type == "function") for call in calls]
    assert ["", '{"city": ', '"Bonn"}', "", "{}"] == [call.function.arguments for call in calls]
    assert [None, "tool_calls"] == [chunk.choices[0].finish_reason for chunk in chunks[-2:]]
    with client.chat.completions.stream(
        model="caller", messages=[{"role": "user", "content": CALLS}], tools=TOOLS
    ) as events:
        final = events.get_final_completion()
    assert [("weather", {"city": "Bonn"}), ("now", {})] == calls_of(final.choices[0].message)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "now"]), ({"type": "function", "function": {"name": "now"}}, ["now"])],
)
def test_calls_are_forced_by_a_grammar(core: TalkerCore, client: openai.OpenAI, choice: Any, names: list[str]) -> None:
    """The prompt ends with the start of a call in the model's format, and the rest of the call follows a grammar."""
    text = f'{{"name": "{names[-1]}", "arguments": {{}}}}'
    (got,) = ask(client, text, tool_choice=choice).choices
    assert core.prompt().endswith(f"{text}<tool_call>\n")
    grammar = core.sampling()["structured_outputs"]["grammar"]
    assert names == [name for name in ("weather", "now") if f'\\"{name}\\"' in grammar]
    assert ("required" == choice) == ("(" in grammar.partition("\n")[0])
    assert ("weather" in names) == (json.dumps(PARAMETERS)[:-1] in grammar)
    # The model of this test repeats its prompt, so that the names of the tools begin the call.
    assert (None, "stop") == (got.message.tool_calls, got.finish_reason)


@pytest.fixture(scope="module")
def language_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of random language models, one for each format whose forced calls differ, by the names of formats."""
    root = tmp_path_factory.mktemp("models")
    write_folder(root / "files")
    (root / "files/chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[-1].content }}")
    (root / "repository").mkdir()
    for name in ("hermes", "llama3_json", "pythonic", "qwen3_xml", "mistral", "harmony"):
        write_model(root / "repository", name, root / "files", tool_parser=name)
    with (
        running_service(root / "repository") as service,
        running_router(tmp_path_factory.mktemp("no_graphs"), service.grpc) as router,
        running_gateway(router.grpc) as gateway,
        openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(("model", "is_parallel"), [("hermes", True), ("llama3_json", False), ("pythonic", False)])
def test_a_random_model_calls_what_it_must(language_models: openai.OpenAI, model: str, is_parallel: bool) -> None:
    """With arguments that fit the schema, streamed as well as whole; what is no schema is refused with its place."""
    city = {"type": "string", "maxLength": 6}
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    schema = {"type": "object", "properties": {"city": city, "days": days}, "required": ["city", "days"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": "rain?"}], "tools": [tool, TOOLS[1]],
        "tool_choice": "required", "parallel_tool_calls": is_parallel, "max_tokens": 400, "seed": 3,
    }  # fmt: skip
    (choice,) = language_models.chat.completions.create(**asked).choices
    with language_models.chat.completions.stream(**asked) as events:
        (streamed,) = events.get_final_completion().choices
    assert calls_of(choice.message) == calls_of(streamed.message)
    assert ("tool_calls", None) == (choice.finish_reason, choice.message.content)
    assert is_parallel or 1 == len(choice.message.tool_calls)
    for name, arguments in calls_of(choice.message):
        assert {} == arguments if name == "now" else len(arguments["city"]) <= 6 and 1 <= arguments["days"] <= 9
    schema["properties"]["days"] = {"type": "number of days"}
    with pytest.raises(openai.BadRequestError, match="number of days"):
        language_models.chat.completions.create(**asked)


@pytest.mark.parametrize("model", ["hermes", "llama3_json", "pythonic", "qwen3_xml", "mistral"])
def test_a_random_model_calls_or_answers_in_the_format(language_models: openai.OpenAI, model: str) -> None:
    """With tools that it may call and a format, each answer is a call or has the format; without them it has."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    days = {"type": "object", "properties": {"days": {"enum": [3, 4]}}, "required": ["days"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": days | {"additionalProperties": False}}}
    asked: Any = {
        "model": model, "messages": [{"role": "user", "content": "rain?"}], "tools": [tool], "response_format": form,
        "max_tokens": 160, "seed": 3, "n": 8, "parallel_tool_calls": False,
    }  # fmt: skip
    is_free = model in ("pythonic", "qwen3_xml")  # their calls have the names of functions, and no schema
    for seed in (3, 4):
        for choice in language_models.chat.completions.create(**asked | {"seed": seed}).choices:
            content = choice.message.content or ""
            if choice.finish_reason == "tool_calls":
                assert is_free or [("f", True)] == [
                    (name, given["days"] in (3, 4)) for name, given in calls_of(choice.message)
                ]
            elif choice.finish_reason == "stop" and not (is_free and content.startswith(("[f(", "<tool_call>"))):
                assert json.loads(content)["n"] in (1, 2)
    for choice in language_models.chat.completions.create(**asked, tool_choice="none").choices:
        assert choice.finish_reason == "length" or json.loads(choice.message.content or "")["n"] in (1, 2)
    asked["tools"][0]["function"]["parameters"]["properties"]["days"] = {"type": "number of days"}
    if not is_free:
        with pytest.raises(openai.BadRequestError, match="number of days"):
            language_models.chat.completions.create(**asked)


def test_tools_and_a_format_are_either_or(
    core: TalkerCore, client: openai.OpenAI, language_models: openai.OpenAI
) -> None:
    """The engine gets both as alternatives; what writes calls and texts as messages has none, and says so."""
    form: Any = {"type": "json_object"}
    ask(client, "{}", response_format=form)
    calls, answer = core.sampling()["structured_outputs"]["any_of"]
    assert {"response_format": form} == answer
    assert calls["grammar"].startswith('start: "<tool_call>\\n" call ("\\n</tool_call>\\n<tool_call>\\n" call)*')
    with pytest.raises(openai.BadRequestError, match="'response_format' and 'tools' cannot be combined") as caught:
        ask(language_models, "{}", response_format=form, model="harmony")
    assert "response_format" == caught.value.param


def test_a_history_of_calls_goes_through_the_template(core: TalkerCore, client: openai.OpenAI) -> None:
    """Arguments are an object there, that writes itself as JSON; content may be missing."""
    calls: Any = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}]
    messages: Any = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "yes"}]},
    ]
    client.chat.completions.create(model="caller", messages=messages, tools=TOOLS)
    assert 'weather now <tool_call>{"city": "Bonn"}={"city": "Bonn"}yes' == core.prompt()


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_apart(client: openai.OpenAI, is_stream: bool) -> None:
    """Whether the model opens it or its template does; and is left out for who does not want it."""

    def message(text: str, **extra: Any) -> dict[str, str]:
        got = ask(client, text, tools=openai.omit, extra_body=extra, stream=is_stream)
        if not is_stream:
            given = got.choices[0].message.model_dump(exclude_none=True)
            return {name: given[name] for name in ("reasoning_content", "content") if name in given}
        found: dict[str, str] = {}
        for chunk in got:
            for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
                found[name] = found.get(name, "") + value
        return {name: found[name] for name in ("reasoning_content", "content") if name in found}

    assert {"reasoning_content": "hm hm", "content": "yes"} == message("<think> hm hm </think> yes")
    assert {"content": "yes"} == message("<think> hm hm </think> yes", include_reasoning=False)
    assert {"content": "a <think> b"} == message("a <think> b")


REFUSED = [
    ({"tools": TOOLS, "model": "talker"}, "tools", "has no place for tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "got a string 'custom'"),
    ({"tools": [7]}, "tools[0]", "got an integer 7"),
    ({"tools": TOOLS * 2}, "tools", "give each name once"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
        "must be \"object\", got a string 'string'",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "got a string 'any'"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wether"}}},
        "tool_choice",
        "not among 'tools'; did you mean 'weather'?",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "is missing"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "newer name is 'tool'"),
    ({"reasoning_effort": "lots"}, "reasoning_effort", "one of none, minimal"),
    ({"functions": [{"name": "f"}]}, "functions", "newer name is 'tools'"),
    *(
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]},
            f"messages[0].tool_calls[0].function.{name}",
            words,
        )
        for function, name, words in [
            ({"name": "f", "arguments": "{"}, "arguments", "must be the text of a JSON object"),
            ({"name": "f", "arguments": "[1]"}, "arguments", "must be a JSON object, got an array"),
            ({"name": "f", "arguments": '{"a": "\\ud800"}'}, "arguments", "surrogate"),
            ({"arguments": "{}"}, "name", "is missing"),
        ]
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_is_wrong_is_said(gateway: GatewayProcess, fields: dict[str, Any], param: str, words: str) -> None:
    """With its place and the cure."""
    body = {"model": "caller", "messages": [{"role": "user", "content": "a"}], **fields}
    status, got, _ = gateway.post("/v1/chat/completions", body)
    assert (400, param) == (status, got["error"]["param"]), got
    assert words in got["error"]["message"]
