"""Streams of token ids against ``tokenizers``' own decode of all ids."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer import Detokenizer, StopStrings

SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
TEXTS = [
    "Hello world, it's größe 東京 🙂 don't do not 's",
    "naïve café — 日本語 テキスト 👨‍👩‍👧",
    "the quick brown fox . ? ! jumps",
]
_TOKENS = [
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁", "▁the", "▁▁x", "a", "b", "é", "東", "▁don", "'t", " .", "##ing", "ing</w>", "x</w>", "n't", "<0x+5>"),
]

DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece-raw": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "byte-fallback": decoders.ByteFallback(),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "strip-tokens": decoders.Sequence([decoders.Strip("▁", 1, 0)]),
    "strip-text": decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 3, 0), decoders.Replace("▁", "_")]),
    "fallback-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
NAMES = ["byte-level", *DECODERS]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    tokenizer.add_tokens([" 東 x", "<tool>"])
    return tokenizer


@cache
def with_decoder(name: str) -> Tokenizer:
    """A fixed vocabulary with byte tokens, word marks and suffixes."""
    if name == "byte-level":
        return byte_level()
    vocabulary = {token: i for i, token in enumerate(_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    if DECODERS[name] is not None:
        tokenizer.decoder = DECODERS[name]
    return tokenizer


@cache
def detokenizer(name):
    """One for each tokenizer."""
    return Detokenizer(with_decoder(name))


def _chunks(draw, ids):
    chunks, start = [], 0
    while start < len(ids):
        size = draw(st.integers(1, 4))
        chunks.append(ids[start : start + size])
        start += size
    return chunks


@st.composite
def _streams(draw):
    """A tokenizer, ids of a text with others among them, and how they come."""
    name = draw(st.sampled_from(NAMES))
    tokenizer = with_decoder(name)
    encoded = tokenizer.encode(draw(st.sampled_from(TEXTS)) if draw(st.booleans()) else "").ids
    ids = encoded[draw(st.integers(0, 5)) :][: draw(st.integers(0, 20))]
    ids += draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=12))
    return name, ids, _chunks(draw, ids)


@settings(max_examples=600, deadline=None)
@given(stream=_streams(), skips=st.booleans())
def test_pieces_of_a_stream_are_the_whole_text(stream, skips):
    """Whatever the tokenizer and the cuts, the pieces together are the decoded text, each of them final."""
    name, ids, chunks = stream
    expected = with_decoder(name).decode(ids, skip_special_tokens=skips)
    text_stream = detokenizer(name).stream(skip_special_tokens=skips)
    text = ""
    for chunk in chunks:
        text += text_stream.push(chunk)
        assert expected.startswith(text)
    assert expected == text + text_stream.finish()


def _cut(text, stop):
    """The text up to the stop string that is complete first, read character by character."""
    for end in range(len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))], max(ended, key=len)
    return text, None


@settings(max_examples=300, deadline=None)
@given(stream=_streams(), stop=st.lists(st.text("the a日本 '", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(stream, stop):
    """With stop strings the text is the decoded one up to the first of them, however it comes."""
    name, ids, chunks = stream
    expected, stopped_by = _cut(with_decoder(name).decode(ids), stop)
    text_stream = detokenizer(name).stream(stop=stop)
    text = "".join([text_stream.push(chunk) for chunk in chunks] + [text_stream.finish()])
    assert (expected, stopped_by) == (text, text_stream.stopped_by)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces, stop):
    """However a text comes in pieces, it ends before the stop string that is complete first."""
    expected = _cut("".join(pieces), stop)
    strings = StopStrings(stop)
    text = "".join([strings.push(piece) for piece in pieces] + [strings.finish()])
    assert expected == (text, strings.stopped_by)


@pytest.mark.parametrize("name", ["llama", "strip-text", "strip-tokens"])
@pytest.mark.parametrize("num_marks", range(6))
def test_spaces_at_the_beginning_are_those_of_the_whole_text(name, num_marks):
    """As many spaces are taken off the beginning as the decoder says, in how many tokens they may come."""
    tokenizer = with_decoder(name)
    ids = [tokenizer.token_to_id("▁")] * num_marks + [tokenizer.token_to_id("a"), tokenizer.token_to_id("▁")]
    stream = detokenizer(name).stream()
    assert tokenizer.decode(ids) == "".join([stream.push([i]) for i in ids]) + stream.finish()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_text_continues_that_of_the_prompt(name, cut):
    """After a prompt the stream gives the rest of the text of prompt and ids, a leading space included."""
    tokenizer = with_decoder(name)
    ids = tokenizer.encode("abc the a b don the bab the").ids
    whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    assert whole.startswith(prompt)
    stream = detokenizer(name).stream(prompt_ids=ids[:cut])
    assert whole[len(prompt) :] == "".join([stream.push([i]) for i in ids[cut:]]) + stream.finish()


def test_leading_space_is_that_of_the_place():
    """The first word of a text has no space before it; the same token after a prompt has."""
    ids = [with_decoder("llama").token_to_id("▁the")]
    alone, after = detokenizer("llama").stream(), detokenizer("llama").stream(prompt_ids=ids)
    assert ("the", " the") == (alone.push(ids), after.push(ids))


def test_prompt_that_ends_inside_a_character():
    """Bytes that the prompt leaves open are completed in the stream."""
    tokenizer = byte_level()
    ids = tokenizer.encode("🙃").ids
    assert len(ids) > 1
    stream = detokenizer("byte-level").stream(prompt_ids=ids[:-1])
    assert ("🙃", "") == (stream.push(ids[-1:]), stream.finish())


def test_character_of_several_tokens_comes_whole():
    """No part of a character is given before its last byte is there."""
    ids = byte_level().encode("🙃").ids
    stream = detokenizer("byte-level").stream()
    assert [""] * (len(ids) - 1) + ["🙃"] == [stream.push([i]) for i in ids]


def test_finish_ends_the_stream():
    """What is still kept back comes once; then nothing more may be pushed."""
    ids = byte_level().encode("🙃").ids
    stream = detokenizer("byte-level").stream()
    assert "" == stream.push(ids[:1])
    assert ("\ufffd", "") == (stream.finish(), stream.finish())
    with pytest.raises(ValueError, match="the stream has ended"):
        stream.push(ids)


def test_nothing_follows_a_stop_string():
    """After a stop string the stream is silent and says which one it was."""
    encode = byte_level().encode
    stream = detokenizer("byte-level").stream(stop=["quick", "fox"])
    assert "the " == stream.push(encode("the quick brown fox").ids)
    assert ("quick", "", "") == (stream.stopped_by, stream.push(encode("more").ids), stream.finish())


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_impossible_id_leaves_the_stream_as_it_was(token_id):
    """An id that no vocabulary can have is INVALID_ARGUMENT, and the ids beside it are not taken."""
    ids = byte_level().encode("the quick").ids
    stream = detokenizer("byte-level").stream()
    with pytest.raises(InvalidArgumentError, match=f"token id {token_id} must be from 0 to 4294967295"):
        stream.push([*ids, token_id])
    assert "the quick" == stream.push(ids) + stream.finish()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]),
    ],
)
def test_decoder_that_cannot_be_streamed_is_named(decoder):
    """A decoder whose text a later token may change at any distance is refused at once."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoder
    with pytest.raises(InvalidArgumentError, match=r"the tokenizer's decoder \{'type': .* cannot be streamed"):
        Detokenizer(tokenizer)


def test_empty_stop_string_is_refused():
    """A stop string of no characters would end every text."""
    with pytest.raises(InvalidArgumentError, match="at least one character, got ''"):
        detokenizer("byte-level").stream(stop=["a", ""])


@given(name=st.sampled_from(["byte-level", "llama", "gemma", "byte-fallback"]), text=st.sampled_from(TEXTS))
def test_bytes_of_tokens_are_those_of_the_text(name, text):
    """Also where a character lies in several tokens; a space that a text of its own would lose stays."""
    tokenizer = with_decoder(name)
    ids = tokenizer.encode(text).ids
    whole = b"".join(detokenizer(name).token_bytes(token_id) for token_id in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False).strip() == whole.decode(errors="replace").strip()
    assert b"" == detokenizer(name).token_bytes(2**20)
