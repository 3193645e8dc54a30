"""The text of a response from the last ids before it, against the text of all ids at once."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.backends.postprocess.detokenize import DecodeContext, TextOptions, new_text
from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer import Detokenizer

SPECIAL = ["<s>", "</s>"]
BYTE_LEVEL = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġab", "ðŁ", "ĻĤðŁ", "æĿ", "±äº"]
WORDS = [
    *("<unk>", "▁", "▁▁▁", "▁a", "ab", "b", "東", "🙂", "##a", "##b", "a</w>", "b</w>", " .", "n't", "\ufffd"),
    *(f"<0x{byte:02X}>" for byte in (*"東🙂é".encode(), *b"ab ")),
]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "byte level": (BYTE_LEVEL, decoders.ByteLevel()),
    "llama": (WORDS, decoders.Sequence(LLAMA)),
    "gemma": (WORDS, decoders.Sequence(LLAMA[:3])),
    "metaspace": (WORDS, decoders.Metaspace()),
    "wordpiece": (WORDS, decoders.WordPiece()),
    "suffixes": (WORDS, decoders.BPEDecoder()),
    "bytes and metaspace": (WORDS, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "suffixes and bytes": (WORDS, decoders.Sequence([decoders.BPEDecoder(), decoders.ByteFallback()])),
    "bytes and suffixes": (WORDS, decoders.Sequence([decoders.ByteFallback(), decoders.BPEDecoder()])),
    "marks off": (WORDS, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("▁", 4, 0)])),
    "none": (WORDS, None),
}


@cache
def make_tokenizer(name):
    """A few tokens, many of which are parts of the same characters, and some that mean something to the decoder."""
    tokens, decoder = DECODERS[name]
    unique = list(dict.fromkeys([*SPECIAL, *tokens]))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(unique)}, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@cache
def make_detokenizer(name):
    """One for each tokenizer."""
    return Detokenizer(make_tokenizer(name))


@st.composite
def answers(draw):
    """A tokenizer, the end of a prompt, ids, what is asked for, whether the last id ends the text, and the pieces."""
    name = draw(st.sampled_from(list(DECODERS)))
    tokenizer = make_tokenizer(name)
    some = [tokenizer.token_to_id(token) for token in ("</s>", "<0xF0>", "<0x61>", "▁a", *"ab", "Ġab", *"ðŁĻĤ")]
    common = st.sampled_from([each for each in some if each is not None])
    any_id = st.one_of(common, st.integers(0, tokenizer.get_vocab_size() - 1))
    prompt, ids = draw(st.lists(any_id, max_size=6)), draw(st.lists(any_id, max_size=40))
    stop = draw(st.lists(st.text("ab .東🙂\ufffd", min_size=1, max_size=4), max_size=2))
    text = tokenizer.decode(ids)
    if len(text) > 8 and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + draw(st.integers(1, 8))])
    options = TextOptions(tuple(stop), draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([0, 0, 3, 20])))
    return name, prompt, ids, options, draw(st.booleans())


def said_at_once(name, prompt, ids, options, ends_by_token):
    """The text, and the ids up to the one that completes the first stop string, else with the one that ended it."""
    stream = make_detokenizer(name).stream(skip_special_tokens=options.skips_special_tokens, prompt_ids=prompt)
    exempt = stream.push(ids[: options.min_tokens])
    checked = ""
    for number, each in enumerate(ids[options.min_tokens :], options.min_tokens + 1):
        checked += stream.push([each])
        if (met := first_stop(checked, options)) is not None:
            return exempt + met, ids[:number]
    checked += stream.finish()
    if (met := first_stop(checked, options)) is not None:
        return exempt + met, ids
    if ends_by_token and not options.shows_stop:
        return said_at_once(name, prompt, ids[:-1], options, False)[0], ids
    return exempt + checked, ids


def first_stop(text, options):
    """The text up to the first stop string, read character by character; None: there is none."""
    for end in range(1, len(text) + 1):
        if ended := [each for each in options.stop if text[:end].endswith(each)]:
            return text[: end if options.shows_stop else end - max(map(len, ended))]
    return None


def said_from_few(name, context, num_previous, ids, options, **ending):
    """The text where only the last ids before it are known; None: refused."""
    before = DecodeContext.from_ids(context, num_previous)
    try:
        return new_text(make_detokenizer(name), before, ids, options, **ending)
    except InvalidArgumentError:
        return None


@settings(max_examples=300, deadline=None)
@given(answer=answers(), data=st.data())
def test_texts_together_are_the_text_at_once(answer, data):
    """However the ids come, and however many of the last are known: what is too little is refused, never wrong."""
    name, prompt, ids, options, ends_by_token = answer
    if ends_by_token and len(ids) <= options.min_tokens:
        return  # no model ends then
    expected, ids = said_at_once(*answer)
    texts, start = [], 0
    while start < len(ids) or not texts:
        end = min(len(ids), start + data.draw(st.integers(1, 4)))
        ending = {"is_last": end == len(ids), "is_ended": end == len(ids) and ends_by_token}
        whole = new_text(
            make_detokenizer(name), DecodeContext(prompt, ids[:start], 0), ids[start:end], options, **ending
        )
        few = data.draw(st.integers(0, 12))
        for known in range(few, min(few + 4, start)):
            text = said_from_few(name, ids[start - known : start], start, ids[start:end], options, **ending)
            assert text in (None, whole)
        texts.append(whole)
        start = end
    assert expected == "".join(texts)


@pytest.mark.parametrize(
    ("name", "tokens", "options"),
    [
        ("byte level", "ð Ł Ļ Ĥ æ Ŀ ± ð Ł Ļ Ĥ Ł Ļ Ĥ Ł a", TextOptions()),
        ("byte level", "a a b a a a b a b a a a b b", TextOptions(("aaabb",))),
        ("byte level", "a b a a b a a a a b a a a b", TextOptions(("aaab",), min_tokens=10)),
        ("byte level", "a b a b a b a b a b a b a b", TextOptions(("ab",), min_tokens=12)),
        ("wordpiece", "ab ##a ##b ##a ##b ##a ##b ab ab", TextOptions(("##", "ba ab"))),
        ("llama", "▁a <0x61> <0xF0> <0x9F> <0x61> ▁ab ▁a b b b", TextOptions(("aa b", "bbbb"))),
        ("suffixes", "a</w> a</w> b</w> a</w> a</w> b</w> b</w> a</w>", TextOptions(("b b",))),
    ],
)
def test_no_number_of_known_ids_gives_a_wrong_text(name, tokens, options):
    """Characters and stop strings across responses, at every place and from every id before it on."""
    found = [make_tokenizer(name).token_to_id(token) for token in tokens.split()]
    ids = said_at_once(name, [], [each for each in found if each is not None], options, False)[1]
    num_said = 0
    for start in range(len(ids)):
        ending = {"is_last": start == len(ids) - 1, "is_ended": False}
        new = ids[start : start + 1]
        whole = new_text(make_detokenizer(name), DecodeContext([], ids[:start], 0), new, options, **ending)
        for known in range(start):
            text = said_from_few(name, ids[start - known : start], start, new, options, **ending)
            assert text in (None, whole)
            num_said += text is not None
    assert num_said


@pytest.mark.parametrize("name", DECODERS)
def test_a_few_words_before_are_enough(name):
    """Of a long answer without stop strings, for any tokenizer."""
    tokenizer = make_tokenizer(name)
    ids = [tokenizer.token_to_id("Ġab" if name == "byte level" else "東")] * 9
    options, detokenizer = TextOptions(), make_detokenizer(name)
    whole = new_text(detokenizer, DecodeContext([], ids, 0), ids[:2], options, is_last=True, is_ended=False)
    before = DecodeContext.from_ids(ids[:5], len(ids))
    assert whole == new_text(detokenizer, before, ids[:2], options, is_last=True, is_ended=False)


def test_the_first_word_continues_the_prompt():
    """Its leading space is lost only where the prompt is not known."""
    word = make_tokenizer("llama").token_to_id("▁a")
    texts = [
        new_text(
            make_detokenizer("llama"),
            DecodeContext.from_ids(context, 0),
            [word],
            TextOptions(),
            is_last=False,
            is_ended=False,
        )
        for context in ([], [word])
    ]
    assert ["a", " a"] == texts


def test_too_few_ids_are_refused():
    """With how many there are, of how many, and why."""
    byte = make_tokenizer("llama").token_to_id("<0x61>")
    with pytest.raises(InvalidArgumentError) as error:
        new_text(
            make_detokenizer("llama"),
            DecodeContext.from_ids([byte] * 3, 9),
            [byte],
            TextOptions(),
            is_last=True,
            is_ended=False,
        )
    assert "the last 3 of 9 token ids before a response are too few for its text" in error.value.message
