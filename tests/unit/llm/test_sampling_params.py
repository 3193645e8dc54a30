"""Sampling parameters, from Python and from JSON."""

import json

import pytest

from weft.base.errors import InvalidArgumentError
from weft.llm.request import SamplingParams


def test_defaults_are_vllms():
    """Without parameters: 16 tokens at temperature 1, nothing filtered, nothing penalised."""
    params = SamplingParams.from_json("")
    assert SamplingParams() == params == SamplingParams.from_json("{}")
    assert (1, 16, 1.0, 1.0, 0, 0.0, None) == (
        params.n,
        params.max_tokens,
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.seed,
    )
    assert not params.has_penalties


def test_json_has_all_the_names():
    """Every field can be given in JSON; lists become tuples, a bias is sorted by token, null is absent."""
    text = """{"n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2, "seed": -7, "stop": "end",
        "stop_token_ids": [3, 4], "ignore_eos": true, "logprobs": 0, "logit_bias": {"9": -100, "3": 1.5},
        "include_stop_str_in_output": true, "skip_special_tokens": false}"""
    expected = SamplingParams(
        n=2,
        max_tokens=5,
        min_tokens=1,
        temperature=0.0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=-7,
        stop=("end",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        logprobs=0,
        logit_bias=((3, 1.5), (9, -100.0)),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    params = SamplingParams.from_json(text)
    assert expected == params
    assert isinstance(params.temperature, float)
    assert SamplingParams() == SamplingParams.from_json(json.dumps(dict.fromkeys(SamplingParams.__slots__)))


def test_a_number_may_be_in_quotes():
    """As clients of Triton's vLLM backend send it; a text that is none stays a text."""
    text = '{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "top_k": "-1", "stop": "1"}'
    expected = SamplingParams(temperature=0.1, top_p=0.95, max_tokens=100, top_k=0, stop=("1",))
    assert expected == SamplingParams.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((1, 2.0),)},
        {"min_tokens": 1},
    ],
)
def test_who_asks_for_penalties(fields):
    """Every parameter that makes logits depend on tokens so far, or biases them, counts as a penalty."""
    assert SamplingParams(**fields).has_penalties


def test_a_tiny_temperature_is_greedy():
    """Below 1e-5 the temperature is 0, so that no logit leaves float32."""
    assert 0.0 == SamplingParams(temperature=1e-9).temperature
    assert 1e-5 == SamplingParams(temperature=1e-5).temperature


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object, got \\[\\]"),
        ("{", "must be a JSON object: "),
        ("[" * 100_000, "must be a JSON object: "),
        ('{"temperature": NaN}', "NaN is no number"),
        ('{"temperature": -Infinity}', "-Infinity is no number"),
        ('{"temperature": 1e999}', "temperature must be a finite number, got inf"),
        ('{"temperature": 101}', "temperature must be from 0.0 to 100.0, got 101"),
        ('{"temperature": "warm"}', "temperature must be a finite number, got 'warm'"),
        ('{"temperature": "1e999"}', "temperature must be a finite number, got inf"),
        ('{"temperature": "' + "1" * 33 + '"}', "temperature must be a finite number, got '1"),
        ('{"max_tokens": "4.0"}', "max_tokens must be a whole number, got 4.0"),
        ('{"temperature": true}', "temperature must be a finite number, got True"),
        ('{"temperatur": 1}', "unknown sampling parameter 'temperatur'; did you mean 'temperature'"),
        ('{"beam_width": 1}', "unknown sampling parameter 'beam_width'.*allowed are n, max_tokens, "),
        ('{"n": 0}', "n must be from 1 to 128, got 0"),
        ('{"n": 1.0}', "n must be a whole number, got 1.0"),
        ('{"n": false}', "n must be a whole number, got False"),
        ('{"max_tokens": 0}', "max_tokens must be from 1 to"),
        ('{"max_tokens": 9999999999}', "max_tokens must be from 1 to 2147483647, got 9999999999"),
        ('{"min_tokens": 17}', "min_tokens must be at most max_tokens = 16, got 17"),
        ('{"top_p": 0}', "top_p must be from 1e-06 to 1.0, got 0"),
        ('{"top_k": -2}', "top_k must be from 0 to 2147483647, or -1 for all tokens, got -2"),
        ('{"min_p": 1.1}', "min_p must be from 0.0 to 1.0"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be from 0.01"),
        ('{"presence_penalty": 2.1}', "presence_penalty must be from -2.0 to 2.0"),
        ('{"seed": 9223372036854775808}', "seed must be from .* got a number beyond 64 bits"),
        ('{"seed": 1' + "0" * 5000 + "}", "JSON object"),
        ('{"logprobs": 21}', "logprobs must be from 0 to 20, got 21"),
        ('{"stop": [""]}', "stop must be a text or a list of at most 32 texts of 1 to 1024 characters"),
        ('{"stop": 1}', "stop must be a text"),
        ('{"stop": [' + ", ".join(['"x"'] * 33) + "]}", "at most 32 texts"),
        ('{"stop_token_ids": [-1]}', "stop_token_ids must be a list of at most 256 token ids, got"),
        ('{"stop_token_ids": 1}', "stop_token_ids must be a list"),
        ('{"logit_bias": {"x": 1}}', "logit_bias must map .* got {'x': 1}"),
        ('{"logit_bias": {"-1": 1}}', "logit_bias must map"),
        ('{"logit_bias": {"1": 101}}', "logit_bias must map at most 1024 token ids to numbers from -100 to 100"),
        ('{"logit_bias": {"1": "1"}}', "logit_bias must map"),
        ('{"logit_bias": [1]}', "logit_bias must map"),
        ('{"ignore_eos": 1}', "ignore_eos must be true or false, got 1"),
    ],
)
def test_what_is_refused(text, message):
    """A wrong name, type or value is refused with its name, what was got and what is allowed."""
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams.from_json(text)


def test_a_refusal_does_not_repeat_what_was_sent():
    """A value of a megabyte is shown by its beginning."""
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams.from_json(json.dumps({"stop": ["x" * 1_000_000]}))
    assert len(caught.value.message) < 300
