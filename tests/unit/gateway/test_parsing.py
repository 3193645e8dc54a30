"""Parsing of bodies: any body is a request or an error with a name."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from weft.base.errors import DeadlineExceededError
from weft.gateway.errors import RequestError
from weft.gateway.json_text import parse_json
from weft.gateway.openai import chat, completions

NO_HEADERS = Headers()
USER = [{"role": "user", "content": "hi"}]
#: Every field with a meaning, and some without.
NAMES = [
    "add_generation_prompt", "best_of", "cache_salt", "chat_template_kwargs", "echo", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p",
    "min_tokens", "model", "n", "presence_penalty", "priority", "prompt", "repetition_penalty", "response_format",
    "seed", "service_tier", "skip_special_tokens", "speculation", "stop", "stop_token_ids", "stream", "stream_options",
    "suffix", "temperature", "timeout", "tool_choice", "tools",
    "parallel_tool_calls", "reasoning_effort", "include_reasoning", "top_k", "top_logprobs", "top_p", "user",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "type", "text", "tool_calls"]), VALUES), max_size=3
)


def parse(module: Any, body: dict[str, Any], headers: Headers = NO_HEADERS) -> Any:
    return module.ENDPOINT.read(json.dumps(body).encode(), headers)[0]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES | MESSAGES, max_size=6), st.booleans())
def test_any_body_is_a_request_or_an_error(fields: dict[str, Any], is_complete: bool) -> None:
    """Nothing else is raised, and the sampling parameters can be sent as JSON."""
    body = ({"model": "m", "prompt": "p", "messages": USER} if is_complete else {}) | fields
    for module, other in ((completions, "messages"), (chat, "prompt")):
        given_body = {name: value for name, value in body.items() if name != other}
        with contextlib.suppress(RequestError, DeadlineExceededError):
            parsed = parse(module, given_body)
            json.dumps(getattr(parsed, "common", parsed).sampling, allow_nan=False).encode()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | VALUES.map(json.dumps).map(str.encode))
def test_any_bytes_are_an_object_or_an_error(data: bytes) -> None:
    """And the object is the one that Python's own reader finds."""
    with contextlib.suppress(RequestError):
        value = parse_json(data)
        assert json.loads(data) == value


def test_an_answer_may_come_back_as_a_message() -> None:
    """With the empty fields that OpenAI's objects have."""
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "tool_calls": None}
    parsed = parse(chat, {"model": "m", "messages": [*USER, answer]})
    assert [*USER, {"role": "assistant", "content": "yes"}] == parsed.messages


def test_null_is_as_absent() -> None:
    """For every field that may be left out."""
    needed = {"model": "m", "prompt": "p"}
    nulls = dict.fromkeys(set(NAMES) - {"messages", *needed} - CHAT_ONLY)
    assert parse(completions, needed) == parse(completions, nulls | needed)


CHAT_ONLY = {
    "add_generation_prompt", "chat_template_kwargs", "max_completion_tokens", "response_format", "tool_choice", "tools",
    "parallel_tool_calls", "reasoning_effort", "include_reasoning", "top_logprobs",
}  # fmt: skip


def test_the_shorter_of_two_times_counts() -> None:
    """Of the field and the header, both in seconds; neither: the gateway's own."""
    body = {"model": "m", "prompt": "p"}
    for field, header, expected in (
        (2, "1.5", 1.5),
        (0.5, "1.5", 0.5),
        (None, "3", 3.0),
        (2, "", 2.0),
        (None, "", None),
    ):
        headers = Headers({"x-request-timeout": header} if header else {})
        assert expected == parse(completions, body | {"timeout": field}, headers).timeout_s
    with pytest.raises(RequestError, match="from 0 to 86400, got a number nan"):
        parse(completions, body, Headers({"x-request-timeout": "nan"}))


@pytest.mark.parametrize(
    ("module", "fields", "name", "expected"),
    [
        (chat, {}, "max_tokens", 2**31 - 1),
        (chat, {"max_tokens": 3}, "max_tokens", 3),
        (chat, {"max_completion_tokens": 4}, "max_tokens", 4),
        (chat, {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", 5),
        (completions, {}, "max_tokens", 16),
        (completions, {"speculation": "none"}, "speculation", "none"),
    ],
)
def test_fields_are_sampling_parameters(module: Any, fields: dict[str, Any], name: str, expected: object) -> None:
    """A chat has no limit of its own and takes both names of it; completions end after 16 tokens, as OpenAI's do."""
    body = {"model": "m"} | ({"messages": USER} if module is chat else {"prompt": "p"})
    parsed = parse(module, body | fields)
    assert expected == getattr(parsed, "common", parsed).sampling[name]
