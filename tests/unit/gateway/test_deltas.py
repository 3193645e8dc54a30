"""What is made of a model's responses."""

import json
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from weft.base.core import InferResult
from weft.base.errors import InternalError, RemoteError, UnavailableError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import bytes_tensor, encode
from weft.gateway.errors import RequestError
from weft.gateway.openai.generate import (
    ChoiceDelta,
    DeltaReader,
    Usage,
    chat_logprobs,
    collect,
    completion_logprobs,
    generate,
    merge,
)
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import TextRequest


def response(**outputs: Any) -> InferResult:
    """A response with these outputs: lists of texts or of numbers."""
    tensors = {
        name: bytes_tensor(values, (len(values),)) if isinstance(values[0], str) else encode(np.array(values, np.int32))
        for name, values in outputs.items()
    }
    return InferResult("m", "1", "", {}, tensors)


def token(token_id: int, *others: int) -> dict[str, Any]:
    """A map by id; ranks in the order given, which is not that of the map."""
    ids = [token_id, *others]
    return {str(i): {"logprob": -float(i), "rank": sorted(ids).index(i) + 1, "decoded_token": f"t{i}"} for i in ids}


def test_a_choice_ends_once() -> None:
    """Although each response repeats it for the others' sake; what is not told is not known."""
    reader = DeltaReader(2)
    first = response(text_output=["a", "b"], finish_reason=["stop", "None"], num_output_tokens=[1, 2])
    assert [ChoiceDelta(0, "a", "stop", None, None, 1), ChoiceDelta(1, "b", None, None, None, 2)] == list(
        reader.read(first)
    )
    second = response(text_output=["", "c"], finish_reason=["stop", "length"], num_input_tokens=[7])
    assert [ChoiceDelta(1, "c", "length", None, 7, None)] == list(reader.read(second))
    assert [ChoiceDelta(0, "x"), ChoiceDelta(1, "y")] == list(DeltaReader(2).read(response(text_output=["x", "y"])))


def test_a_response_may_leave_the_text_out() -> None:
    """Why a choice ended, and its tokens, count as they do beside an empty text."""
    (end,) = DeltaReader(1).read(response(finish_reason=["stop"], num_output_tokens=[1], num_input_tokens=[7]))
    assert ChoiceDelta(0, "", "stop", None, 7, 1) == end
    (count,) = DeltaReader(1).read(response(num_output_tokens=[3]))
    assert ChoiceDelta(0, "", num_output_tokens=3) == count
    assert [] == list(DeltaReader(1).read(response()))
    with pytest.raises(InternalError):
        list(DeltaReader(1).read(response(finish_reason=["stop", "stop"])))


def test_the_ids_tell_which_token_was_sampled() -> None:
    """Else it is the one that is not among the best, else the first; the best come in order."""
    maps = json.dumps([token(3, 1, 2), token(5, 4)])
    told = response(text_output=["x", "y"], logprobs=[maps, "null"], output_ids=[2, 4, 9], num_output_tokens=[2, 1])
    first, second = DeltaReader(2).read(told)
    assert [("t2", -2.0), ("t4", -4.0)] == [(one["token"], one["logprob"]) for one in first.logprobs or ()]
    assert ["t1", "t2", "t3"] == [one["token"] for one in (first.logprobs or ())[0]["top_logprobs"]]
    assert second.logprobs is None
    untold = {"7": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}
    outside = {"8": {"logprob": -9.0, "rank": None, "decoded_token": "b"}}
    (piece,) = DeltaReader(1).read(response(text_output=["x"], logprobs=[json.dumps([untold, untold | outside])]))
    assert ["a", "b"] == [one["token"] for one in piece.logprobs or ()]
    assert [1, 1] == [len(one["top_logprobs"]) for one in piece.logprobs or ()]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e9])
def test_what_cannot_happen_has_a_number(logprob: float) -> None:
    """JSON has none for it."""
    text = json.dumps([{"1": {"logprob": logprob, "rank": 1, "decoded_token": None}}])
    (piece,) = DeltaReader(1).read(response(text_output=["x"], logprobs=[text]))
    assert {"token": "", "logprob": -9999.0, "bytes": [], "top_logprobs": [ANY]} == (piece.logprobs or ())[0]


@pytest.mark.parametrize(
    "outputs",
    [
        {"text_output": ["a", "b"]},
        {"text_output": ["a"], "logprobs": ["{"]},
        {"text_output": ["a"], "logprobs": ["[{}]"]},
        {"text_output": ["a"], "logprobs": ["[1]"]},
        {"text_output": ["a"], "logprobs": ['[{"1": {"logprob": 1, "rank": 1}}]']},
        {"text_output": [1, 2]},
    ],
)
def test_a_model_that_is_not_what_it_says_is_a_defect(outputs: dict[str, Any]) -> None:
    """INTERNAL with an id, whatever does not fit."""
    with pytest.raises(InternalError, match="the model 'm' answered with tensors that do not fit"):
        list(DeltaReader(1).read(response(**outputs)))


def test_log_probabilities_of_both_forms() -> None:
    """Keyed by text the most probable of equal ones is shown; a part of a character has bytes where they are told."""
    best = [("a", -0.1, None), ("\ufffd", -0.2, None), ("\ufffd", -0.25, [0xE2]), ("a", -0.3, None)]
    first = {
        str(rank): {"logprob": logprob, "rank": rank, "decoded_token": text, "bytes": data}
        for rank, (text, logprob, data) in enumerate(best)
    }
    second = {"9": {"logprob": -5.0, "rank": None, "decoded_token": "ü"}}
    told = response(
        text_output=["aü"], logprobs=[json.dumps([first, second])], output_ids=[3, 9], num_output_tokens=[2]
    )
    (delta,) = DeltaReader(1).read(told)
    tokens = delta.logprobs
    assert {
        "tokens": ["a", "ü"],
        "token_logprobs": [-0.3, -5.0],
        "top_logprobs": [{"a": -0.1, "\ufffd": -0.2}, {"ü": -5.0}],
        "text_offset": [4, 5],
    } == completion_logprobs(tokens, 4)
    content = (chat_logprobs(tokens, 3) or {})["content"]
    assert [[[97], None, [0xE2]], []] == [[one["bytes"] for one in each["top_logprobs"]] for each in content]
    assert list("ü".encode()) == content[1]["bytes"]
    assert (None, None) == (completion_logprobs(None, 0), chat_logprobs(None, 0))


async def pieces(*items: ChoiceDelta | Exception) -> AsyncGenerator[ChoiceDelta, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def test_answers_are_gathered_and_counted() -> None:
    """The prompt's tokens once for each prompt, whatever the number of its choices and pieces."""
    usage = Usage(2)
    got = [
        ChoiceDelta(0, "a", None, None, 3, 1),
        ChoiceDelta(3, "d", "stop", None, 5, 1),
        ChoiceDelta(0, "b", "length", None, 3, 1),
    ]
    choices = await collect(merge([pieces(*got[:1], *got[2:]), pieces(got[1])]), 4, usage)
    assert ["ab", "", "", "d"] == [choice.text for choice in choices]
    assert ["length", None, None, "stop"] == [choice.finish_reason for choice in choices]
    assert {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11} == usage.as_json()
    assert Usage(1).as_json() is None
    for choice, num_cached_tokens in ((0, 2), (1, 2), (2, 1)):
        usage.add(ChoiceDelta(choice, "", None, None, 3, 1, num_cached_tokens))
    assert {"cached_tokens": 3} == (usage.as_json() or {})["prompt_tokens_details"]


async def test_the_first_failure_ends_all() -> None:
    """And closes the other sources."""
    closed = []

    async def endless() -> AsyncGenerator[ChoiceDelta, None]:
        try:
            while True:
                yield ChoiceDelta(0, "x")
        finally:
            closed.append(True)

    with pytest.raises(RemoteError, match="full"):
        await collect(merge([endless(), pieces(RemoteError("RESOURCE_EXHAUSTED", "full"))]), 1, Usage(1))
    assert [True] == closed


async def test_an_answer_that_broke_off_is_an_error() -> None:
    """A graph's last response with `graph_incomplete` ends the deltas with UNAVAILABLE, not as if it were complete."""

    class Router:
        async def stream(self, request: object, **_: object) -> AsyncGenerator[InferResult, None]:
            yield InferResult("g", "1", "", {}, {"text_output": bytes_tensor([b"Hel"], (1,))})
            yield InferResult("g", "1", "", {"graph_incomplete": "root/llm: INTERNAL"}, {})

    spec = tuple(TensorSpec(name, "BYTES", (1,)) for name in ("text_input", "text_output"))
    model = TextModel(ModelSignature("g", "1", "graph", 0, spec[:1], spec[1:], is_decoupled=True), "", {})
    request = TextRequest("g", {"max_tokens": 3}, True, False, {}, None, prompts=["Say"])
    router: Any = Router()
    deltas = generate(router, model, request, request_id="1", metadata=(), timeout_s=5)
    assert "Hel" == (await anext(deltas)).text
    with pytest.raises(UnavailableError, match=r"'g' is incomplete: root/llm: INTERNAL"):
        await anext(deltas)


def test_log_probabilities_that_a_graph_lacks_are_refused() -> None:
    """`logprobs` of a model without that output is an error that names the field, not a null in the answer."""
    spec = tuple(TensorSpec(name, "BYTES", (1,)) for name in ("text_input", "sampling_parameters", "text_output"))
    model = TextModel(ModelSignature("g", "1", "graph", 0, spec[:2], spec[2:], is_decoupled=True), "", {})
    request = TextRequest("g", {"logprobs": 1}, True, False, {}, None)
    with pytest.raises(RequestError, match="has no output 'logprobs'") as caught:
        model.make_request(request, "Say", "1")
    assert "logprobs" == caught.value.param
