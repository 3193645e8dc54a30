"""The ``detokenize_stream`` transform: the texts of the responses together are the text of all ids at once."""

import json
import random

import numpy as np
import pytest
from tests.unit.backends.files import byte_level
from tests.unit.builders import execute_batch, load_backend, make_served_request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError

TEXT = "Hello world, größe 東京 🙂🧵, naïve 👩‍👩‍👧 text. User: more\n"
IDS, TEXTS = ("INT32", (-1,)), ("BYTES", (1,))
INPUTS = {
    "output_ids": IDS,
    "context_ids": IDS,
    "num_previous_tokens": ("UINT32", (1,)),
    "finish_reason": TEXTS,
    "sampling_parameters": TEXTS,
}
END = 0


def byte_fallback():
    """As Llama 2 has it: words begin with a mark, what the vocabulary lacks is bytes, the first space is dropped."""
    vocabulary = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(params=[byte_level, byte_fallback])
def tokenizer(request):
    """Two kinds of tokenizers that split characters."""
    return request.param()


@pytest.fixture
def load(version_folder, make_model_context, tokenizer):
    """Makes a loaded transform."""
    tokenizer.save(str(version_folder / "tokenizer.json"))

    def make(inputs=INPUTS):
        optional = ("sampling_parameters", "num_previous_tokens")
        model = make_model_context(inputs, {"text_output": TEXTS}, max_batch_size=0, optional=optional)
        return load_backend(BACKENDS["detokenize_stream"], model)

    return make


@pytest.fixture
def texts(load):
    """The texts of an answer's responses, made in any order; each is one request of its own.

    With ``prompt``, or so many ``known`` ids before each response, it tells how many are the answer's.
    """
    backend = load()

    def make(pieces, reason="length", *, prompt=(), known=None, **sampling):
        requests, context = [], []
        for number, piece in enumerate(pieces, start=1):
            arrays = {
                "output_ids": np.array(piece, np.int32),
                "context_ids": np.array([*prompt, *context] if known is None else context[-known:], np.int32),
                "finish_reason": np.array([reason if number == len(pieces) else "None"], np.object_),
            }
            if prompt or known is not None:
                arrays["num_previous_tokens"] = np.array([len(context)], np.uint32)
            if sampling:
                arrays["sampling_parameters"] = np.array([json.dumps(sampling)], np.object_)
            requests.append(make_served_request(**arrays))  # type: ignore[arg-type]
            context = context + piece
        random.Random(0).shuffle(order := list(range(len(requests))))
        outcomes = execute_batch(backend, *(requests[index] for index in order))
        by_index = dict(zip(order, outcomes, strict=True))
        return [by_index[index].outputs["text_output"][0].decode() for index in range(len(requests))]

    return make


def cut(ids, seed):
    """The ids in pieces of 0 to 3."""
    generator, pieces = random.Random(seed), []
    while ids:
        size = generator.randrange(4)
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


@pytest.mark.parametrize("seed", range(5))
def test_texts_together_are_the_text_at_once(texts, tokenizer, seed):
    """However the ids are cut; and no text has a part of a character."""
    ids = tokenizer.encode(TEXT).ids
    got = texts(cut(ids, seed))
    assert TEXT == tokenizer.decode(ids) == "".join(got)
    assert "\ufffd" not in "".join(got)
    assert max(map(len, got)) < len(TEXT)


@pytest.mark.parametrize("cut_by", range(1, 4))
def test_an_answer_that_ends_within_a_character_ends_as_at_once(texts, tokenizer, cut_by):
    """The bytes that are left become U+FFFD, in the last response and no earlier."""
    ids = tokenizer.encode("so 🙂").ids[:-cut_by]
    got = texts([[each] for each in ids])
    assert tokenizer.decode(ids) == "".join(got)
    assert all("\ufffd" not in text for text in got[:-1])
    assert "\ufffd" in got[-1]


def test_the_last_ids_before_a_response_are_enough(texts, tokenizer):
    """However long the answer is; stop strings are found as if all were known."""
    pieces = [[each] for each in tokenizer.encode(TEXT * 9).ids]
    assert texts(pieces) == texts(pieces, known=64)
    asked = {"stop": ["User: more\nHi"], "min_tokens": 90, "skip_special_tokens": False}
    assert TEXT * 9 == "".join(texts(pieces, known=64, **asked))


def test_the_text_continues_that_of_the_prompt(texts, tokenizer):
    """Its first word keeps its space, and a stop string does not begin in the prompt."""
    prompt = tokenizer.encode("so").ids
    space, *rest = tokenizer.encode("so it is").ids[len(prompt) :]
    assert " it is" == "".join(texts([[space], rest], prompt=prompt))
    assert " it " == "".join(texts([[space], rest], prompt=prompt, stop=["o i", "is"]))


def test_too_few_ids_before_a_response_are_refused(load, tokenizer):
    """With how many there are, and of how many; a number of ids must not be negative."""
    ids = np.array(tokenizer.encode("abcdef").ids, np.int32)
    backend = load({**INPUTS, "num_previous_tokens": ("INT64", (1,))})
    outcomes = execute_batch(
        backend,
        *(
            make_served_request(
                output_ids=ids,
                context_ids=ids[:2],
                num_previous_tokens=np.array([number]),
                finish_reason=np.array(["length"], np.object_),
                sampling_parameters=np.array(['{"stop": "abcdef"}'], np.object_),
            )
            for number in (100, -1)
        ),
    )
    messages = [outcome.message for outcome in outcomes if isinstance(outcome, InvalidArgumentError)]
    assert "the last 2 of 100 token ids before a response are too few for its text" in messages[0]
    assert "input 'num_previous_tokens' must be from 0, got -1" == messages[1]


@pytest.mark.parametrize("shows", [False, True])
def test_the_text_ends_with_a_stop_string(texts, tokenizer, shows):
    """It is found across responses, what comes after it is dropped, and it is shown if the request says so."""
    pieces = [[each] for each in tokenizer.encode(TEXT).ids]
    got = texts(pieces, stop=["User:", "Uses"], include_stop_str_in_output=shows)
    assert TEXT[: TEXT.index("User:") + 5 * shows] == "".join(got)
    assert TEXT.replace("\n", "") == "".join(texts(pieces, stop="\n"))


def test_stop_strings_do_not_count_before_min_tokens(texts, tokenizer):
    """One that ends with a later token ends the text."""
    ids = tokenizer.encode("ab ab ab").ids
    for min_tokens in range(len(ids) + 1):
        shown = "".join(texts([[each] for each in ids], stop=["b"], min_tokens=min_tokens))
        at_once = [tokenizer.decode(ids[:number]) for number in range(1, len(ids) + 1)]
        ends = [text for number, text in enumerate(at_once, 1) if number > min_tokens and text.endswith("b")]
        assert (ends[0][:-1] if ends else "ab ab ab") == shown


def test_a_token_that_ends_the_answer_gives_no_text(texts, tokenizer):
    """Be it special or not; with `include_stop_str_in_output` it does, as in vLLM."""
    ids = tokenizer.encode("one two").ids
    pieces = [ids[:1], ids[1:]]
    assert tokenizer.decode(ids[:-1]) == "".join(texts(pieces, "stop"))
    assert "one two" == "".join(texts(pieces, "stop", include_stop_str_in_output=True))
    ended = [ids, [END]]
    assert "one two" == "".join(texts(ended, "stop", skip_special_tokens=False))
    assert "one two</s>" == "".join(texts(ended, "length", skip_special_tokens=False))
