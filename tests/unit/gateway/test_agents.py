"""``/v1/responses`` and ``/v1/messages``: what becomes of a body, by ``agents.txt``, and how answers are written."""

import copy
import json
import pickle
import random
import re
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from tests.case_files import Case, cases, says, table

from weft.base.errors import ResourceExhaustedError
from weft.gateway import anthropic
from weft.gateway.anthropic import MessageWriter
from weft.gateway.errors import RequestError
from weft.gateway.openai import responses
from weft.gateway.openai.answer import REASONING_MARKS, AnswerForm
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.generate import ChoiceDelta
from weft.gateway.openai.parts import PartWriter
from weft.gateway.openai.responses import ResponseWriter
from weft.gateway.openai.tools import FORMATS

ENDPOINTS: dict[str, Endpoint] = {"responses": responses.ENDPOINT, "messages": anthropic.ENDPOINTS[0]}
LEAST: dict[str, dict[str, Any]] = {
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


def parse(name: str, fields: dict[str, Any], *, is_strict: bool = True) -> tuple[Any, Any]:
    body = json.dumps(LEAST[name] | fields).encode()
    return ENDPOINTS[name].read(body, Headers(), is_strict=is_strict)


@cases(Path(__file__).with_name("agents.txt"))
def test_a_body_becomes_a_chat(case: Case) -> None:
    """The same messages, tools, variables and sampling parameters as one of ``/v1/chat/completions`` has."""
    name = case.option("endpoint")
    chat, ignored = parse(name, json.loads(case.text))
    lines = [json.dumps(message, ensure_ascii=False) for message in chat.messages]
    if use := chat.tool_use:
        lines += [f"tool {json.dumps(tool)} {json.dumps(use.schemas[tool['function']['name']])}" for tool in use.tools]
        lines.append(f"forced {', '.join(use.forced) or 'none'}{'' if use.is_parallel else ', one call'}")
    lines.append(f"sampling {json.dumps(chat.common.sampling)}")
    lines += [f"variables {json.dumps(chat.variables)}"] if chat.variables else []
    lines += [f"parameters {json.dumps(chat.common.parameters)}", f"ignored {', '.join(ignored)}"]
    lines += [] if chat.shows_reasoning else ["without reasoning"]
    case.check("\n".join(lines))


@pytest.mark.parametrize(("kind", "text", "words"), table(Path(__file__).with_name("agents_refused.txt")))
def test_what_is_wrong_is_said(kind: str, text: str, words: str) -> None:
    """With the field's path, and what is taken instead; also where fields that nobody knows are refused."""
    param, _, words = words.partition(": ")
    with pytest.raises(RequestError) as caught:
        parse(kind, json.loads(text))
    assert param == (caught.value.param or "-"), caught.value.message
    assert says(words, caught.value.message), caught.value.message
    caught.value.message.encode()


ODD = [
    None,
    True,
    0,
    1e300,
    "",
    "a",
    "\ud800",
    [],
    {},
    [None],
    [{}],
    {"type": []},
    {"type": "function", "name": {}},
    7,
    ["a"],
]


def places(value: Any) -> Iterable[tuple[Any, Any]]:
    """Each object or array in a value, with each of its names or indices."""
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, name
        yield from places(value[name])


@cases(Path(__file__).with_name("agents.txt"))
def test_no_body_breaks_a_parser(case: Case) -> None:
    """Whatever stands wherever: it is refused by name, or what becomes of it can be sent on."""
    draw, name = random.Random(1), case.option("endpoint")
    for _ in range(200):
        fields = copy.deepcopy(LEAST[name]) | json.loads(case.text)
        for _ in range(draw.choice((1, 1, 2))):
            where, key = draw.choice(list(places(fields)))
            where[key] = copy.deepcopy(draw.choice(ODD))
        try:
            chat, _ = parse(name, fields, is_strict=False)
        except RequestError as error:
            error.message.encode()
            continue
        tools = chat.tool_use.tools if chat.tool_use else ()
        json.dumps([chat.messages, chat.repeated, chat.variables, tools], ensure_ascii=False).encode()
        pickle.loads(pickle.dumps(chat))  # large bodies are parsed in another process


async def pieces(texts: Iterable[str], reason: str = "stop") -> AsyncGenerator[ChoiceDelta, None]:
    """A step for each text, of one token; then the end."""
    for text in texts:
        yield ChoiceDelta(0, text, None, None, 7, 1, 3)
    yield ChoiceDelta(0, "", reason, None, 7, 1, 3)


def anonymous(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    text = re.sub(r'"((call_)?id)": "\w+"', r'"\1": ""', json.dumps(value))
    return json.loads(re.sub(r'"(\w+_at)": \d+', r'"\1": 0', text))


def rebuilt(events: list[dict[str, Any]]) -> Any:
    """The answer as a client puts it together of the events alone."""
    content: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for number, event in enumerate(events):
        kind = event["type"]
        assert event.get("sequence_number", number) == number
        if kind == "message_start":
            answer = event["message"]
        elif kind == "content_block_start":
            content.append(event["content_block"])
        elif kind == "content_block_delta":
            ((field, text),) = ((name, value) for name, value in event["delta"].items() if name != "type")
            block = content[event["index"]]
            if field == "partial_json":
                block["input"] = (block["input"] or "") + text
            else:
                block[field] += text
        elif kind == "content_block_stop" and isinstance(content[event["index"]].get("input"), str):
            text = content[event["index"]]["input"]
            try:
                content[event["index"]]["input"] = json.loads(text)
            except ValueError:
                content[event["index"]]["input"] = {"INVALID_JSON": text}
        elif kind == "message_delta":
            answer |= {"content": content, "usage": event["usage"], **event["delta"]}
        elif kind == "response.created":
            answer = event["response"]
        elif kind == "response.output_item.added":
            content.append(event["item"])
        elif kind == "response.content_part.added":
            content[event["output_index"]]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            item = content[event["output_index"]]
            if "arguments" in item:
                item["arguments"] += event["delta"]
            else:
                item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            item = content[event["output_index"]]
            own = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            assert own == event.get("text", event.get("arguments"))
        elif kind == "response.output_item.done":
            content[event["output_index"]]["status"] = event["item"]["status"]
            assert content[event["output_index"]] == event["item"]
        elif kind in ("response.completed", "response.incomplete"):
            last = event["response"]
            ends = {name: last[name] for name in ("completed_at", "status", "usage", "incomplete_details")}
            answer |= {"output": content, **ends}
    return answer


def writer(name: str, form: AnswerForm) -> PartWriter:
    return (MessageWriter if name == "messages" else ResponseWriter)(parse(name, {})[0], form)


@pytest.mark.parametrize("name", ENDPOINTS)
@cases(Path(__file__).with_name("tool_calls.txt"))
async def test_a_stream_has_what_the_whole_answer_has(case: Case, name: str) -> None:
    """However its text is cut: in one piece, in three, in characters."""
    thinks = {option for option, _ in case.options} >= {"thinks"}
    form = AnswerForm(
        marks=REASONING_MARKS["think"] if thinks else None,
        is_reasoning=case.option("thinks") == "open",
        tools=FORMATS.get(case.option("format")),
        schemas=json.loads(case.option("schemas")),
    )
    draw, text = random.Random(1), case.text
    whole = anonymous(await writer(name, form).body(pieces([text])))
    cuts = [sorted(draw.choices(range(len(text)), k=2)) for _ in range(20)] if text else []
    for cut in [[text], *([text[:a], text[a:b], text[b:]] for a, b in cuts), list(text)]:
        events = [event async for event in writer(name, form).events(pieces(cut))]
        got = anonymous(rebuilt(events))
        usage = got.pop("usage")
        assert len(cut) + 1 == usage["output_tokens"]
        assert {**whole, "usage": None} == {**got, "usage": None}, cut


@pytest.mark.parametrize("name", ENDPOINTS)
async def test_tokens_are_counted_by_what_they_are_for(name: str) -> None:
    """Those of the prompt that the cache had, and those that were reasoning, by the model's steps."""
    form = AnswerForm(marks=REASONING_MARKS["think"])
    got = (await writer(name, form).body(pieces(["<think>", "hm", " hm", "</think>", "\n", "yes", "!"], "length")))[
        "usage"
    ]
    if name == "messages":
        assert (4, 3, 0) == tuple(got[f"{one}input_tokens"] for one in ("", "cache_read_", "cache_creation_"))
        assert (8, {"thinking_tokens": 5}) == (got["output_tokens"], got["output_tokens_details"])
    else:
        assert (7, 8, 15) == (got["input_tokens"], got["output_tokens"], got["total_tokens"])
        assert ({"cached_tokens": 3}, {"reasoning_tokens": 5}) == (
            got["input_tokens_details"],
            got["output_tokens_details"],
        )


async def test_reasoning_behind_a_text_counts_alone() -> None:
    """The text between is none of it, where a model reasons more than once."""
    texts = ["<|channel|>analysis<|message|>", "a", "<|end|>", "<|channel|>commentary<|message|>", "Let", " me"]
    texts += ["<|end|>", "<|channel|>analysis<|message|>", "b", "<|end|>", "<|channel|>final<|message|>", "yes"]
    got = await writer("responses", AnswerForm(marks=REASONING_MARKS["harmony"])).body(pieces(texts))
    assert ["reasoning", "message", "reasoning", "message"] == [item["type"] for item in got["output"]]
    assert 4 <= got["usage"]["output_tokens_details"]["reasoning_tokens"] <= 9


async def test_an_answer_says_why_it_ended() -> None:
    """By its length, with what was cut; at a stop string, with that; with calls."""
    calls = AnswerForm(tools=FORMATS["hermes"])
    cut = ['a <tool_call>{"name": "f", "arguments": {"a": "b']
    got = await writer("responses", calls).body(pieces(cut, "length"))
    assert ("incomplete", {"reason": "max_output_tokens"}, None) == tuple(
        got[name] for name in ("status", "incomplete_details", "completed_at")
    )
    assert ["completed", "incomplete"] == [item["status"] for item in got["output"]]
    got = await writer("messages", calls).body(pieces(cut, "length"))
    assert ("max_tokens", {"INVALID_JSON": '{"a": "b'}) == (got["stop_reason"], got["content"][1]["input"])
    got = await writer("messages", calls).body(pieces(['<tool_call>{"name": "f"}</tool_call>']))
    assert ("tool_use", {}) == (got["stop_reason"], got["content"][0]["input"])

    async def stopped() -> AsyncGenerator[ChoiceDelta, None]:
        yield ChoiceDelta(0, "a", "stop", stop_reason="END")

    got = await writer("messages", AnswerForm()).body(stopped())
    assert ("stop_sequence", "END") == (got["stop_reason"], got["stop_sequence"])


@pytest.mark.parametrize("name", ENDPOINTS)
async def test_an_empty_answer_is_one(name: str) -> None:
    """Also of a model that sends nothing at all, and reports no tokens."""

    async def nothing() -> AsyncGenerator[ChoiceDelta, None]:
        return
        yield

    for deltas in (partial(pieces, []), nothing):
        events = [event async for event in writer(name, AnswerForm()).events(deltas())]
        got = rebuilt(events)
        if name == "messages":
            assert ([], "end_turn") == (got["content"], got["stop_reason"])
            assert ["message_start", "ping", "message_delta", "message_stop"] == [event["type"] for event in events]
        else:
            assert ["output_text"] == [part["type"] for item in got["output"] for part in item["content"]]


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    """With the answer so far, and a code that clients know."""
    writing = writer("responses", AnswerForm())

    async def broken() -> AsyncGenerator[ChoiceDelta, None]:
        yield ChoiceDelta(0, "a b")
        raise ResourceExhaustedError("the queue is full")

    with pytest.raises(ResourceExhaustedError) as caught:
        _ = [event async for event in writing.events(broken())]
    event = writing.error_body(caught.value)
    assert ("response.failed", "failed") == (event["type"], event["response"]["status"])
    assert {"code": "rate_limit_exceeded", "message": "the queue is full"} == event["response"]["error"]
    assert [("incomplete", "a b")] == [
        (item["status"], item["content"][0]["text"]) for item in event["response"]["output"]
    ]
    event = writer("messages", AnswerForm()).error_body(caught.value)
    assert {"type": "rate_limit_error", "message": "the queue is full"} == event["error"]
