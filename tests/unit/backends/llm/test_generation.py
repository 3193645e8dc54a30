"""From what the engine gives to responses: streams, one answer, slow readers, several choices, errors."""

import numpy as np
import pytest
from tests.unit.backends.llm.builders import make_request

from weft.backends.llm.generation import MAX_RESPONSES_IN_FLIGHT, Generation
from weft.backends.llm.tensors import GenerationRequest
from weft.base.errors import InternalError
from weft.llm.request import Delta, SamplingParams, TokenLogprobs


@pytest.fixture
def calls():
    """Names of the callbacks that were called."""
    return []


@pytest.fixture
def make_generation(codec, sink, calls):
    """``make_generation(outputs, streamed=True, echo="", **sampling parameters)``."""

    def make(*outputs, streamed=True, echo="", **params):
        asked = GenerationRequest(
            np.array([0], np.int32),
            SamplingParams(**params),
            streamed,
            frozenset(outputs or ("text_output",)),
            echo,
            b"",
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


def test_a_stream_has_a_response_for_each_delta(make_generation, sink, ids_of, calls):
    """The last is final; nothing comes without news."""
    generation = make_generation("text_output", "finish_reason", "num_output_tokens", "output_ids")
    for text in "xy":
        _say(generation, ids_of(text))
        generation.flush()
    _say(generation, ids_of("z"), finish_reason="length", is_last=True)
    assert [["x"], ["y"], ["z"]] == sink.shown()
    assert [["None"], ["None"], ["length"]] == sink.shown("finish_reason")
    assert [[1]] * 3 == sink.shown("num_output_tokens")
    assert [ids_of("x"), ids_of("y"), ids_of("z")] == sink.shown("output_ids")
    assert (True, ["over"]) == (sink.is_over, calls)


def test_a_response_tells_what_was_before(make_generation, sink, ids_of):
    """The end of the prompt, the ids of earlier responses, and how many those are."""
    generation = make_generation("output_ids", "context_ids", "num_previous_tokens")
    for text in ("x", "yz"):
        _say(generation, ids_of(text))
    _say(generation, ids_of("z"), finish_reason="length", is_last=True)
    assert [[0], [0, *ids_of("x")], [0, *ids_of("xyz")]] == sink.shown("context_ids")
    assert [[0], [1], [3]] == sink.shown("num_previous_tokens")


def test_a_response_tells_what_the_cache_had(make_generation, sink, ids_of):
    """As the first delta says it: copies of a prompt find all of it."""
    generation = make_generation("num_cached_tokens", n=2)
    _say(generation, ids_of("x"), choice=0, num_cached_tokens=16)
    _say(generation, ids_of("x"), choice=1, num_cached_tokens=31)
    assert [[16], [16]] == sink.shown("num_cached_tokens")


def test_one_answer_has_everything(make_generation, sink, ids_of):
    """After the prompt, where that is to be repeated."""
    generation = make_generation(streamed=False, echo="pre ")
    for text in "xyz":
        _say(generation, ids_of(text))
    assert [] == sink.answers
    _say(generation, [], finish_reason="length", is_last=True)
    assert [["pre xyz"]] == sink.shown()


def test_a_slow_reader_gets_longer_responses(make_generation, sink, ids_of):
    """Tokens are gathered while so many responses are not taken; the last never waits."""
    generation = make_generation("text_output", "num_output_tokens")
    for text in "abcdefgh":
        _say(generation, ids_of(text))
    assert [["a"], ["b"], ["c"], ["d"]] == sink.shown()
    assert MAX_RESPONSES_IN_FLIGHT == len(sink.answers)
    generation.on_response_taken()
    generation.flush()
    assert ["efgh"] == sink.shown()[-1]
    assert [4] == sink.shown("num_output_tokens")[-1]
    _say(generation, ids_of("i"))
    _say(generation, ids_of("j"), finish_reason="length", is_last=True)
    assert (["ij"], True) == (sink.shown()[-1], sink.is_over)


def test_choices_come_side_by_side(make_generation, sink, ids_of, calls):
    """One that has ended says nothing more, and the last one's end is the request's."""
    generation = make_generation("text_output", "finish_reason", "output_ids", "num_output_tokens", n=2, stop=("!",))
    _say(generation, ids_of("a!"), choice=0)
    assert ["finish 0"] == calls  # the other goes on
    _say(generation, ids_of("bc"), choice=1)
    _say(generation, ids_of("d"), choice=0)
    assert ids_of("a!") == sink.shown("output_ids")[0]
    _say(generation, ids_of("!"), choice=1)
    assert [["a", ""], ["", "bc"], ["", ""]] == sink.shown()
    assert ["stop", "stop"] == sink.shown("finish_reason")[-1]
    assert [0, 2] == sink.shown("num_output_tokens")[1]
    assert ["finish 0", "finish 1", "over"] == calls


def test_a_stop_string_ends_the_work_of_the_engine(make_generation, sink, ids_of, calls):
    """Which may have said more before it heard of it."""
    generation = make_generation(stop=("!",))
    _say(generation, ids_of("a!"))
    _say(generation, ids_of("b"))
    assert ([["a"]], ["finish 0", "over"]) == (sink.shown(), calls)


def test_an_error_is_the_last_response(make_generation, sink, ids_of, calls):
    """What was not sent is lost with it."""
    generation = make_generation()
    _say(generation, ids_of("a"))
    generation.add(Delta(None, -1, [], error=InternalError("a step failed"), is_last=True))
    generation.flush()
    assert isinstance(sink.answers[-1], InternalError)
    assert (True, ["over"]) == (sink.is_over, calls)


def test_a_response_that_cannot_be_made_fails_the_request(make_generation, sink, calls):
    """Then the engine is told to stop; log probabilities that do not fit the tokens are a defect."""
    generation = make_generation("logprobs", logprobs=0)
    generation.add(Delta(None, 0, [5, 6], logprobs=[TokenLogprobs(-1.0, (), ())], finish_reason="length", is_last=True))
    with pytest.raises(ValueError, match="zip"):
        generation.flush()
    generation.fail(InternalError("no response"))
    assert (True, ["withdraw", "over"]) == (sink.is_over, calls)


def test_numbers(make_generation, sink, ids_of):
    """The logarithm adds up over the responses; tokens of the prompt are told each time."""
    generation = make_generation("cumulative_logprob", "num_input_tokens", logprobs=0)
    for number in (1, 2):
        _say(generation, ids_of("a"), logprobs=[TokenLogprobs(-0.5 * number, (), ())])
    assert [[-0.5], [-1.5]] == sink.shown("cumulative_logprob")
    assert [[1], [1]] == sink.shown("num_input_tokens")


def test_what_a_span_is_told(make_generation, ids_of):
    """Attributes of OpenTelemetry's conventions; events for the first token and each response, in order."""
    generation = make_generation(temperature=0.5, seed=7)
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
