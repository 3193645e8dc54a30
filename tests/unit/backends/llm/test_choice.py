"""The text of one continuation: characters, stop strings, the end."""

import json

import pytest
import tokenizers

from weft.backends.llm.generation import ChoiceOutput
from weft.backends.llm.text import TextCodec
from weft.llm.request import Delta, SamplingParams, TokenLogprobs


@pytest.fixture
def make_choice(codec):
    """``make_choice(**sampling parameters)``."""

    def make(*, wants_text=True, **params):
        return ChoiceOutput(SamplingParams(**params), codec, [], wants_text=wants_text)

    return make


def _pieces(choice, *deltas):
    """What is said after each delta: ids or (ids, finish reason)."""
    pieces = []
    for delta in deltas:
        ids, reason = delta if isinstance(delta, tuple) else (delta, "")
        choice.add(Delta(None, 0, ids, finish_reason=reason))
        pieces.append(choice.take_text())
        choice.mark_sent()
    return pieces


def test_a_character_is_never_cut(make_choice, ids_of):
    """Its bytes wait for the last one; what stays incomplete is said at the end."""
    a, b, c = ids_of("€")
    assert ["", "", "€"] == _pieces(make_choice(), [a], [b], [c])
    assert ["", "\ufffd"] == _pieces(make_choice(), [a], ([b], "length"))


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(make_choice, ids_of, include):
    """Across tokens; what looked like one comes after all; what the engine had ahead is dropped."""
    choice = make_choice(stop=("bxb", "cdx"), include_stop_str_in_output=include)
    pieces = _pieces(choice, ids_of("ab"), ids_of("x"), ids_of("zcd"), ids_of("xyz"), ids_of("more"))
    assert ["a", "", "bxz", "cdx" if include else "", ""] == pieces
    assert "stop" == choice.finish_reason


def test_tokens_behind_a_stop_string_are_none(make_choice, ids_of):
    """However many came at once."""
    choice = make_choice(stop=("x",), wants_text=False, logprobs=0)
    ids = ids_of("yxyy")
    logprobs = [TokenLogprobs(-1.0, (), ())] * 4
    choice.add(Delta(None, 0, ids, logprobs=logprobs))
    assert (ids[:2], -2.0, "stop") == (choice.ids, choice.cumulative_logprob, choice.finish_reason)


def test_no_stop_string_before_min_tokens(make_choice, ids_of):
    """It counts from the token after those."""
    assert ["xx", ""] == _pieces(make_choice(stop=("x",), min_tokens=2), ids_of("xx"), ids_of("x"))


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abz")])
def test_the_token_that_ends_gives_no_text(make_choice, ids_of, include, text):
    """Unless what ends the text belongs to it; it is among the ids in any case."""
    for stop in ((), ("nothing",)):
        choice = make_choice(include_stop_str_in_output=include, stop=stop)
        choice.add(Delta(None, 0, ids_of("abz"), finish_reason="stop"))
        assert (text, ids_of("abz"), "stop") == (choice.take_text(), choice.ids, choice.finish_reason)


def test_what_might_have_been_a_stop_string_is_said_at_the_end(make_choice, ids_of):
    """The reason is the engine's."""
    choice = make_choice(stop=("xyz",))
    assert ["a", "xy"] == _pieces(choice, ids_of("ax"), (ids_of("y"), "length"))
    assert "length" == choice.finish_reason


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
    assert 5000 * most * 0.9 < _num_sent(make_choice(stop=stop, wants_text=False), ids) <= 5000 * (most + 1)


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


def test_special_tokens(make_choice):
    """They show where that was asked for."""
    assert [""] == _pieces(make_choice(), [1])
    assert ["</s>"] == _pieces(make_choice(skip_special_tokens=False), [1])


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
    codec = TextCodec(tmp_path / "tokenizer.json", 100)
    shown = [codec.shown_token(token_id) for token_id in range(4)]
    assert [("</s>", b"</s>"), (" the", b" the"), ("the", b"the"), ("\ufffd", b"\xe2")] == [
        (each.text, bytes(each.data)) for each in shown
    ]
