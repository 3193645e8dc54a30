"""What a request asks for, and everything that may be wrong with it."""

import pytest
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm.tensors import RequestReader
from weft.base.errors import InvalidArgumentError


@pytest.fixture
def reader(codec):
    return RequestReader(codec, max_choices=4)


def test_a_text_is_tokenized(reader, codec):
    """With the special tokens that the tokenizer adds, unless they are in it already; never cut short."""
    asked = reader.read(make_request(text_input="abcdab"))
    assert ["<s>", "abcd", "ab"] == [codec.shown_token(token_id).text for token_id in asked.prompt_ids.tolist()]
    asked = reader.read(make_request(text_input="xyzxyz", parameters={"add_special_tokens": False}))
    assert 6 == len(asked.prompt_ids)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({}, ["<s>", *"a</s>b"]),
        ({"parse_special_tokens": True}, ["<s>", "a", "</s>", "b"]),
        ({"add_special_tokens": False}, ["a", "</s>", "b"]),
        ({"add_special_tokens": False, "parse_special_tokens": False}, [*"a</s>b"]),
    ],
)
def test_special_tokens_in_a_text_are_text_unless_asked_for(reader, codec, parameters, tokens):
    """Asked for by name, or by a text that is said to have the special tokens already."""
    asked = reader.read(make_request(text_input="a</s>b", parameters=parameters))
    assert tokens == [codec.shown_token(token_id).text for token_id in asked.prompt_ids.tolist()]
    asked = reader.read(make_request(text_input="ab", parameters={}))
    assert ["<s>", "ab"] == [codec.shown_token(token_id).text for token_id in asked.prompt_ids.tolist()]


def test_ids_go_as_they_are(reader):
    """And ids come back, beside the text."""
    asked = reader.read(make_request(input_ids=[5, 6, 7]))
    assert [5, 6, 7] == asked.prompt_ids.tolist()
    assert {"output_ids", "text_output"} == asked.outputs
    assert {"output_ids"} == RequestReader(None, 4).read(make_request(input_ids=[5])).outputs


def test_ids_count_where_both_come(reader):
    """In a graph the text that they were made of may come along."""
    assert [5] == reader.read(make_request(text_input="abc", input_ids=[5])).prompt_ids.tolist()


@pytest.mark.parametrize(
    ("inputs", "is_streamed", "echo"),
    [
        ({}, False, "abc"),
        ({"stream": True}, True, ""),
        ({"exclude_input_in_output": True}, False, ""),
        ({"stream": True, "exclude_input_in_output": True}, True, ""),
        ({"stream": False, "exclude_input_in_output": False}, False, "abc"),
    ],
)
def test_the_prompt_is_repeated_as_by_triton(reader, inputs, is_streamed, echo):
    """Before the one answer unless it is excluded, and never in a stream."""
    asked = reader.read(make_request(text_input="abc", **inputs))
    assert (is_streamed, echo) == (asked.is_streamed, asked.echo)


def test_a_collected_stream_is_one_answer(reader):
    """With the text that the stream would have had."""
    asked = reader.read(make_request(text_input="abc", stream=True, is_collected=True))
    assert (False, "") == (asked.is_streamed, asked.echo)


def test_the_text_of_ids_is_repeated_where_asked(reader, ids_of):
    """Their text is made for that."""
    request = make_request(input_ids=ids_of("abc"), exclude_input_in_output=False)
    assert "abc" == reader.read(request).echo


def test_outputs_by_name_or_by_flag(reader):
    """Names decide where there are any."""
    assert {"text_output"} == reader.read(make_request(text_input="a")).outputs
    flags = {"return_finish_reason": True, "return_num_output_tokens": True, "return_logprobs": False}
    asked = reader.read(make_request(text_input="a", **flags))  # type: ignore[arg-type]
    assert {"text_output", "finish_reason", "num_output_tokens"} == asked.outputs
    asked = reader.read(make_request(text_input="a", outputs=("logprobs",), return_finish_reason=True))
    assert {"logprobs"} == asked.outputs


def test_sampling_parameters(reader):
    """From the input; else from the request's own parameters, where others stand too; what an output needs is added."""
    request = make_request(text_input="a", sampling_parameters='{"top_k": 3}', parameters={"temperature": 0.5})
    assert (3, 1.0) == (reader.read(request).params.top_k, reader.read(request).params.temperature)
    request = make_request(text_input="a", parameters={"temperature": 0.5, "priority": 1, "cache_salt": "x"})
    assert (0.5, None, b"x") == (
        reader.read(request).params.temperature,
        reader.read(request).params.logprobs,
        reader.read(request).salt,
    )
    assert 0 == reader.read(make_request(text_input="a", return_cumulative_logprob=True)).params.logprobs


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "one of the inputs 'text_input' and 'input_ids' must be given, got neither"),
        ({"text_input": b"ab\xff"}, "'text_input' is not UTF-8: invalid start byte at byte 2 of 3"),
        ({"text_input": "x" * 101}, "'text_input' has 101 bytes; at most 100 are allowed"),
        ({"text_input": "a", "sampling_parameters": "{"}, "must be a JSON object"),
        ({"text_input": "a", "sampling_parameters": b"\xff"}, "'sampling_parameters' is not UTF-8"),
        ({"text_input": "a", "sampling_parameters": '{"temprature": 1}'}, "unknown sampling parameter 'temprature'"),
        ({"text_input": "a", "sampling_parameters": '{"n": 5}'}, "n must be at most 4, .* got 5"),
        ({"text_input": "a", "parameters": {"temperature": "hot"}}, "temperature must be a finite number"),
        ({"text_input": "a", "parameters": {"cache_salt": 3}}, "'cache_salt' must be a text .* got 3"),
        ({"text_input": "a", "parameters": {"add_special_tokens": "no"}}, "'add_special_tokens' must be true or false"),
        (
            {"text_input": "a", "parameters": {"parse_special_tokens": 1}},
            "'parse_special_tokens' must be true or false",
        ),
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            "'exclude_input_in_output' must not be false for a stream",
        ),
    ],
)
def test_what_is_wrong_is_refused(reader, request_, message):
    """With what was got and what is allowed."""
    with pytest.raises(InvalidArgumentError, match=message):
        reader.read(make_request(**request_))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"text_input": "a"}, "'text_input' needs a tokenizer"),
        ({"input_ids": [1], "outputs": ("text_output",)}, "'text_output' needs a tokenizer"),
        ({"input_ids": [1], "sampling_parameters": '{"stop": "x"}'}, "stop needs a tokenizer"),
    ],
)
def test_without_a_tokenizer_there_is_no_text(request_, message):
    """The message says what to send instead."""
    with pytest.raises(InvalidArgumentError, match=f"{message}.*tokenizer.json"):
        RequestReader(None, 4).read(make_request(**request_))
