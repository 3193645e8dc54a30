"""``LookaheadProposer``: drafts from a pool of n-grams and from fixed-point iteration."""

from array import array
from collections.abc import Sequence
from typing import TypeVar

from weft.llm.scheduler.plan import num_accepted

#: N-grams of each length that the pool keeps, the most recently seen ones: about half a megabyte a sequence.
_MAX_NGRAMS = 2048
_NO_TOKEN = -1

_Key = TypeVar("_Key")


class LookaheadProposer:
    """Needs no second model: drafts come from n-grams that the target has sampled before.

    The pool maps the last two tokens, or else the last one, to the token that followed most recently: in the prompt, in
    the output, and in what the target sampled behind a wrong draft, which is a step of Jacobi iteration and often right
    except for its position. If the pool has no entry, those samples themselves are the drafts for their positions.

    Unlike the paper, it verifies a chain, not several n-grams at once, and has no lookahead branch. The paper adds a
    window of guesses to every step, with their own attention mask, so that the pool grows even if all drafts fail. Here
    the drafts are the only window, so no step computes a row that cannot be accepted, and text without repetition gets
    few drafts. At temperatures above 0 its samples share the noise of their positions, so the iteration still converges
    to the same output.

    Source:
        Lookahead decoding, https://arxiv.org/abs/2402.02057; Jacobi decoding, https://arxiv.org/abs/2305.10427.
    """

    def __init__(self, max_len: int) -> None:
        del max_len
        self._pairs: dict[tuple[int, int], int] = {}
        self._singles: dict[int, int] = {}
        self._num_seen = 0
        self._guesses: Sequence[int] = ()
        self._guesses_from = 0  # position of the first of them

    def propose(self, tokens: "array[int]", num_drafts: int) -> Sequence[int]:
        """See ``Proposer``."""
        # Enter the n-grams of new tokens; of many the last ones.
        for index in range(max(self._num_seen, len(tokens) - _MAX_NGRAMS, 1), len(tokens)):
            token, following = tokens[index - 1], tokens[index]
            if index > 1:
                _put(self._pairs, (tokens[index - 2], token), following)
            _put(self._singles, token, following)
        self._num_seen = len(tokens)
        guesses = self._guesses[max(len(tokens) - self._guesses_from, 0) :]
        drafts: list[int] = []
        before, last = (tokens[-2] if len(tokens) > 1 else _NO_TOKEN), tokens[-1]
        for index in range(num_drafts):
            guess = self._pairs.get((before, last))
            if guess is None:
                guess = self._singles.get(last)
            if guess is None and index < len(guesses):
                guess = guesses[index]
            if guess is None:
                break
            drafts.append(guess)
            before, last = last, guess
        return drafts

    def observe(self, drafts: Sequence[int], samples: Sequence[int]) -> None:
        """See ``Proposer``."""
        count = num_accepted(drafts, samples)
        for index in range(max(count + 1, 2), len(samples)):
            before, token = drafts[index - 2], drafts[index - 1]
            if (before, token) not in self._pairs:  # what was output counts for more
                _put(self._pairs, (before, token), samples[index])
            if token not in self._singles:
                _put(self._singles, token, samples[index])
        self._guesses = samples[count + 1 :]
        self._guesses_from = self._num_seen + count + 1


def _put(pool: dict[_Key, int], key: _Key, following: int) -> None:
    pool.pop(key, None)
    pool[key] = following
    if len(pool) > _MAX_NGRAMS:
        del pool[next(iter(pool))]
