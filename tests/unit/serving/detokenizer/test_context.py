"""How many ids before a piece of text must be known: few, whatever the ids are."""

import pytest
from tokenizers import Tokenizer, decoders, models

from weft.serving.detokenizer import Demand, Detokenizer, enough_of, is_enough

END, BYTE, WORD = 0, 1, 2
TOKENS = ["</s>", "<0x41>", "▁a"]
GOES_ON = Demand(True, 0, False)


@pytest.fixture(scope="module")
def detokenizer():
    """Of a tokenizer with an end token, a byte and a word, as Llama 2 has them."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Detokenizer(tokenizer)


def num_sent(detokenizer, ids, num_chars):
    """Ids that are sent before the ids, one by one."""
    demand, last, total = Demand(True, num_chars, False), len(ids) - 1, 0
    for place, each in enumerate(ids):
        enough = enough_of(detokenizer, ids[:place], [each], demand._replace(is_last=place == last))
        total += place if enough is None else len(enough)
    return total


PATTERNS = {
    "words": [WORD],
    "bytes": [BYTE],
    "skipped": [END],
    "a word in 99 bytes": [BYTE] * 99 + [WORD],
    "a word in 99 skipped": [END] * 99 + [WORD],
    "bytes in 99 skipped": [END] * 99 + [BYTE],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_answer_needs_ids_in_proportion_to_its_length(detokenizer, pattern):
    """Also one that is a single run of bytes, or hardly has any text; a stop string of five characters may begin."""
    few, many = ((PATTERNS[pattern] * 2000)[:number] for number in (1000, 2000))
    assert num_sent(detokenizer, many, 4) < 2.5 * num_sent(detokenizer, few, 4)


def test_64_ids_of_a_text_are_enough(detokenizer):
    """And no fewer are given, but all."""
    assert [WORD] * 64 == enough_of(detokenizer, [WORD] * 1000, [WORD], Demand(True, 100, True))
    assert enough_of(detokenizer, [WORD] * 64, [WORD], GOES_ON) is None


def test_characters_that_a_stop_string_needs(detokenizer):
    """The first token might have ended a run of bytes, the second begun the text; those after them count."""
    for number in range(1, 5):
        assert is_enough(detokenizer, [WORD] * (number + 2), [WORD], Demand(True, 2 * number, False))
        assert not is_enough(detokenizer, [WORD] * (number + 1), [WORD], Demand(True, 2 * number, False))


@pytest.mark.parametrize(
    ("ids", "is_last", "expected"),
    [([BYTE], False, True), ([BYTE], True, False), ([BYTE, WORD], False, False), ([END], False, True)],
)
def test_a_run_of_bytes_must_be_whole_where_it_ends(detokenizer, ids, is_last, expected):
    """While it goes on it gives no text, however much of it is known."""
    assert expected == is_enough(detokenizer, [BYTE] * 9, ids, GOES_ON._replace(is_last=is_last))
    assert is_enough(detokenizer, [WORD, WORD, *[BYTE] * 9], ids, GOES_ON._replace(is_last=is_last))
