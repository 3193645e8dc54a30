"""From what the engine gives to responses: texts, stop strings, streams, one answer, slow readers, choices, errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.case_files import Case, cases, literals
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm.generation import ChoiceOutput, Generation
from weft.backends.llm.tensors import GenerationRequest
from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import tokenizer_at
from weft.base.errors import InternalError, WeftError
from weft.llm.request import HELD, RELEASED, Delta, SamplingParams, TokenLogprobs


@pytest.fixture
def calls():
    """Names of the callbacks that were called."""
    return []


@pytest.fixture
def make_generation(codec, sink, calls):
    """``make_generation(outputs, streamed=True, echo="", **sampling parameters)``."""

    def make(*outputs, streamed=True, echo="", num_dropped=0, resume=(), **params):
        asked = GenerationRequest(
            *(np.array([0], np.int32), SamplingParams(**params), streamed, frozenset(outputs), echo, b""),
            num_dropped=num_dropped,
            resume_token_ids=resume,
            resume_logprob=-2.5 if resume else 0.0,
        )
        return Generation(
            make_request(),
            asked,
            codec,
            sink,
            finish=lambda choice: calls.append(f"finish {choice}"),
            cancel=lambda: calls.append("withdraw"),
            on_done=lambda: calls.append("over"),
        )

    return make


def _say(generation, ids, choice=0, **more):
    generation.add(Delta(None, choice, ids, **more))
    generation.flush()


@pytest.fixture
def ids_of_line(codec, ids_of):
    """The tokens of a text, whose lone surrogates are bytes."""
    by_bytes = {bytes(codec.shown_token(token_id).data): token_id for token_id in range(258)}
    return lambda text: ids_of(text) if text.isprintable() else [by_bytes[text.encode("utf-8", "surrogateescape")]]


@pytest.mark.parametrize(("stop", "num_answers"), [((), 2), (("a",), 1)], ids=["token", "stop string"])
def test_a_lease_that_ends_with_the_first_token(make_generation, sink, calls, ids_of, stop, num_answers):
    """Both come before a response is made: the token is sent all the same, and one final response."""
    generation = make_generation("text_output", "output_ids", stop=stop)
    generation.add(Delta(None, 0, ids_of("a"), finish_reason=HELD))
    generation.add(Delta(None, 0, [], finish_reason=RELEASED, is_last=True))
    assert ids_of("a") == sink.answers[0].outputs["output_ids"].tolist()
    assert (num_answers, True, "over") == (len(sink.answers), sink.is_over, calls[-1])
    assert 1 == calls.count("over")


@cases(Path(__file__).with_name("generations.txt"))
def test_generation(make_generation, sink, calls, ids_of_line, case: Case):
    """Responses come from the steps of an engine as the case says; nothing comes without news."""
    outputs, params = case.option("outputs").split(), json.loads(case.option("params"))
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    is_streamed, dropped = case.option("answer") != "one", int(case.option("dropped") or 0)
    resumed = tuple(each for text in json.loads(case.option("resume") or "[]") for each in ids_of_line(text))
    generation = make_generation(
        *outputs, streamed=is_streamed, echo=case.option("echo"), num_dropped=dropped, resume=resumed, **params
    )

    def step(line):
        before, num_calls = len(sink.answers), len(calls)
        verb, _, rest = line.partition(" ")
        if verb == "taken":
            generation.on_response_taken()
        elif verb == "error":
            generation.add(Delta(None, -1, [], error=InternalError(rest), is_last=True))
        else:
            generation.add(_delta(int(verb), rest, ids_of_line))
        generation.flush()
        generation.flush()
        made = sink.answers[before:]
        for _ in made if case.option("reader") != "slow" else ():
            generation.on_response_taken()
        lines = [_shown(each, outputs) for each in made]
        return [*lines[:-1], *("final " * sink.is_over + each for each in lines[-1:]), *calls[num_calls:]]

    case.check_script(step)


def _delta(choice: int, line: str, ids_of: Any) -> Delta:
    text, end = json.JSONDecoder().raw_decode(line)
    words = line[end:].split()
    given = literals(" ".join(word for word in words if "=" in word))
    reason = next((word for word in words if "=" not in word), "")
    more = {"num_cached_tokens": given["cached"]} if "cached" in given else {}
    ids = ids_of(text)
    logprobs = [TokenLogprobs(given["logprob"], (), ())] * len(ids) if "logprob" in given else []
    return Delta(None, choice, ids, logprobs=logprobs, finish_reason=reason, **more)


def _shown(answer: Any, outputs: list[str]) -> str:
    if isinstance(answer, WeftError):
        return answer.message.partition(" (error id")[0]
    arrays = {name: answer.outputs[name] for name in outputs}
    return json.dumps(
        {name: [x.decode() for x in a] if a.dtype == np.object_ else a.tolist() for name, a in arrays.items()},
        ensure_ascii=False,
    )


def test_a_response_that_cannot_be_made_fails_the_request(make_generation, sink, calls):
    """Then the engine is told to stop; log probabilities that do not fit the tokens are a defect."""
    generation = make_generation("logprobs", logprobs=0)
    generation.add(Delta(None, 0, [5, 6], logprobs=[TokenLogprobs(-1.0, (), ())], finish_reason="length", is_last=True))
    with pytest.raises(ValueError, match="zip"):
        generation.flush()
    generation.fail(InternalError("no response"))
    assert (True, ["withdraw", "over"]) == (sink.is_over, calls)


def test_what_a_span_is_told(make_generation, ids_of):
    """Attributes of OpenTelemetry's conventions; events for the first token and each response, in order."""
    generation = make_generation("text_output", temperature=0.5, seed=7)
    _say(generation, ids_of("ab"), num_cached_tokens=1)
    _say(generation, ids_of("x"), finish_reason="length", is_last=True)
    name, attributes, events = generation.describe()
    model = attributes["gen_ai.request.model"]
    assert f"text_completion {model}" == name
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }
    assert expected == {key: attributes[key] for key in expected}
    assert "gen_ai.request.stop_sequences" not in attributes
    assert ["first_token", "response"] == [event for event, _, _ in events]
    assert 1 == events[1][2]["gen_ai.usage.output_tokens"]
    assert events[0][1] <= events[1][1]


@pytest.fixture
def make_choice(codec):
    """``make_choice(**sampling parameters)``."""
    return lambda **params: ChoiceOutput(SamplingParams(**params), codec, [], wants_text=False)


def _num_sent(choice, ids):
    """Ids that are sent before those of each response, one by one."""
    total = 0
    for place, each in enumerate(ids):
        choice.add(Delta(None, 0, [each], finish_reason="" if place < len(ids) - 1 else "length"))
        context = choice.context_ids()
        assert ids[place - len(context) : place] == context or place == len(context)
        assert place == len(choice.sent_ids)
        total += len(context)
        choice.mark_sent()
    return total


@pytest.mark.parametrize(("text", "stop", "most"), [("ab c€", (), 64), ("ab c€", ("x" * 100,), 128), ("</s>", (), 64)])
def test_few_ids_are_sent_before_each_response(make_choice, ids_of, text, stop, most):
    """Of 5,000 no more than their text depends on; all of them once, if they end without having had any text."""
    ids = ids_of(text) if text != "</s>" else [1]
    ids = (ids * 5000)[:5000]
    assert 5000 * most * 0.9 < _num_sent(make_choice(stop=stop), ids) <= 5000 * (most + 1)


def test_ids_before_the_first_are_those_of_the_prompt(codec, ids_of):
    """Whose text goes on; without a tokenizer all ids come along, as nobody knows how many are enough."""
    params, (a, b) = SamplingParams(), ids_of("xy")
    for known in (codec, None):
        choice = ChoiceOutput(params, known, ids_of("pq"), wants_text=False)
        choice.add(Delta(None, 0, [a]))
        assert ids_of("pq") == choice.context_ids()
        choice.mark_sent()
        choice.add(Delta(None, 0, [b]))
        assert [*ids_of("pq"), a] == choice.context_ids()
    assert ids_of("pq") + [a] * 100 == _told(ChoiceOutput(params, None, ids_of("pq"), wants_text=False), [a] * 100)


def _told(choice, ids):
    """The context after those ids."""
    choice.add(Delta(None, 0, ids))
    choice.mark_sent()
    return choice.context_ids()


def test_logprobs(make_choice, ids_of):
    """By token; the sampled one first, with the bytes of half a character, and no rank where it is not known."""
    euro, a = ids_of("€")[0], ids_of("a")[0]
    choice = make_choice(logprobs=1)
    choice.add(
        Delta(None, 0, [euro, a], logprobs=[TokenLogprobs(-2.5, (a,), (-0.5,)), TokenLogprobs(-0.5, (a,), (-0.5,))])
    )
    first, second = json.loads(choice.take_logprobs())
    assert [str(euro), str(a)] == list(first)
    assert {"logprob": -2.5, "rank": None, "decoded_token": "\ufffd", "bytes": [0xE2]} == first[str(euro)]
    assert {str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a", "bytes": [97]}} == second
    assert "null" == make_choice().take_logprobs()


def test_a_shown_token_is_that_of_a_text(tmp_path):
    """With the space before a word, which SentencePiece would not give to a text of its own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "▁the": 1, "the": 2, "<0xE2>": 3}, []))
    decode = tokenizers.decoders
    tokenizer.decoder = decode.Sequence(
        [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tokenizer_at(tmp_path / "tokenizer.json"), 100)
    shown = [codec.shown_token(token_id) for token_id in range(4)]
    assert [("</s>", b"</s>"), (" the", b" the"), ("the", b"the"), ("\ufffd", b"\xe2")] == [
        (each.text, bytes(each.data)) for each in shown
    ]
