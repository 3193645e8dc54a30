"""Drafts copied from earlier occurrences of the last tokens."""

import random
import time
from array import array

import pytest

from weft.llm.speculation.ngram import NgramProposer


def _proposed(tokens: list[int], num_drafts: int = 4) -> list[int]:
    return list(NgramProposer(len(tokens) + 100).propose(array("i", tokens), num_drafts))


def test_what_followed_earlier_is_proposed():
    """The tokens after the earlier occurrence of the last two tokens, as many as asked for."""
    assert [3, 4, 5, 1] == _proposed([1, 2, 3, 4, 5, 1, 2])
    assert [3, 4] == _proposed([1, 2, 3, 4, 5, 1, 2], 2)


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 2], [5, 9, 5, 8, 5]])
def test_nothing_is_proposed_without_a_repetition(tokens: list[int]):
    """A single token that recurs is no match."""
    assert [] == _proposed(tokens)


def test_the_longest_match_wins_and_then_the_latest():
    """Of several earlier places the one with the longest common past, not the latest; of equal ones the latest."""
    assert [7, 8] == _proposed([9, 1, 2, 7, 8, 0, 1, 2, 5, 6, 9, 1, 2], 2)
    assert [5, 6] == _proposed([1, 2, 7, 8, 0, 1, 2, 5, 6, 9, 1, 2], 2)


def test_a_period_goes_on():
    """A match that reaches the end is continued with its own drafts."""
    assert [1, 2, 1, 2, 1, 2, 1] == _proposed([1, 2, 1, 2], 7)
    assert [3] * 5 == _proposed([3, 3, 3], 5)


@pytest.mark.parametrize("num_values", [2, 5, 40, 2**31 - 1])
def test_drafts_are_those_of_a_plain_search(num_values: int):
    """With any steps between calls, and bulk or single indexing, the longest match of the last places is found."""
    rng = random.Random(num_values)
    for _ in range(60):
        length = rng.choice([3, 30, 300])
        tokens = [rng.randrange(num_values) for _ in range(length)]
        copied = rng.randrange(length)
        tokens += tokens[copied : copied + rng.randrange(1, 12)]
        proposer = NgramProposer(len(tokens))
        end = 1
        while end <= len(tokens):
            known = tokens[:end]
            assert _plain(known, 3) == list(proposer.propose(array("i", known), 3))
            end += rng.choice([1, 1, 2, 100])


def _plain(tokens: list[int], num_drafts: int) -> list[int]:
    """As the proposer, by comparing with the 16 latest places that end with the same two tokens."""
    last = len(tokens) - 1
    places = [place for place in range(1, last) if tokens[place - 1 : place + 1] == tokens[last - 1 :]][::-1]

    def match_len(place: int) -> int:
        length = 0
        while length < 16 and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        return length

    best = max(places[:16], key=match_len, default=None)  # the first, that is the latest, of equals
    if best is None:
        return []
    drafts = tokens[best + 1 : best + 1 + num_drafts]
    while len(drafts) < num_drafts:
        drafts.append((tokens[best + 1 :] + drafts)[len(drafts)])
    return drafts


def test_memory_is_bounded_and_long_prompts_are_quick():
    """100,000 tokens take 8 bytes each at most, and seconds are out of the question."""
    tokens = array("i", [random.Random(1).randrange(1000) for _ in range(1000)] * 100)
    proposer = NgramProposer(200_000)
    start_s = time.process_time()
    assert tokens[:4].tolist() == list(proposer.propose(tokens, 4))
    assert time.process_time() - start_s < 5
    assert proposer.num_bytes <= 8 * len(tokens)
