"""``TokenFilter``: allowed tokens and bad words, as masks like those of a grammar."""

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from weft.llm.grammar import GrammarMatcher


class TokenFilter:
    """The tokens that one sequence may continue with; has the interface of a ``GrammarMatcher``. Not thread-safe.

    Args:
        allowed: Token ids that may come; empty: any.
        bad_words: Token ids of texts; the last of each is forbidden behind the others in the output.
        grammar: Where the sequence stands in its grammar, which holds too; None: it has none.
        output: Tokens that the sequence has already.
    """

    __slots__ = ("_allowed", "_bits", "_endings", "_error", "_grammar", "_never", "_num_kept", "_output", "is_forced")

    def __init__(
        self,
        allowed: Seq[int],
        bad_words: Seq[tuple[int, ...]],
        grammar: GrammarMatcher | None,
        output: Seq[int] = (),
    ) -> None:
        self._allowed = allowed
        self._never = [word[0] for word in bad_words if len(word) == 1]
        self._endings: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the last token but one
        for word in bad_words:
            if len(word) > 1:
                self._endings[word[-2]].append(word)
        self._num_kept = max(map(len, bad_words), default=1)
        self._output = [*output[-self._num_kept :]]  # the last tokens
        self._grammar = grammar
        self._bits = np.empty(0, np.int32)
        self._error = ""
        self.is_forced = False

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; "" if it can."""
        return self._error or (self._grammar.error if self._grammar is not None else "")

    def append(self, token: int) -> None:
        """See ``GrammarMatcher.append``."""
        self._output = [*self._output, token][-self._num_kept :]
        if self._grammar is not None:
            self._grammar.append(token)

    def forced(self, most: int) -> list[int]:
        """See ``GrammarMatcher.forced``."""
        return [] if self._grammar is None else self._grammar.forced(most)

    def observe(self, num_accepted: int) -> None:
        """See ``GrammarMatcher.observe``."""
        if self._grammar is not None:
            self._grammar.observe(num_accepted)

    def num_valid(self, drafts: Seq[int]) -> int:
        """See ``GrammarMatcher.num_valid``; a draft that is filtered out may be among them, and is not accepted."""
        return len(drafts) if self._grammar is None else self._grammar.num_valid(drafts)

    def fill(self, drafts: Seq[int], masks: npt.NDArray[np.int32]) -> None:
        """See ``GrammarMatcher.fill``."""
        if self._grammar is None:
            masks[:] = -1
        else:
            self._grammar.fill(drafts, masks)
        output = self._output
        for mask, draft in zip(masks, [*drafts, -1], strict=True):
            self._filter(mask.view(np.uint32), output)
            if not mask.any():
                self._error = "allowed_token_ids, bad_words and the grammar leave no token that may come next"
            if draft < 0 or not mask.view(np.uint32)[draft // 32] >> np.uint32(draft % 32) & 1:
                return
            output = [*output, draft]

    def _filter(self, mask: npt.NDArray[np.uint32], output: list[int]) -> None:
        if len(self._bits) != len(mask):
            bits = np.zeros(32 * len(mask), np.uint8) if self._allowed else np.ones(32 * len(mask), np.uint8)
            bits[list(self._allowed)] = 1
            bits[self._never] = 0
            self._bits = np.packbits(bits, bitorder="little").view(np.int32)
        mask &= self._bits.view(np.uint32)
        for word in self._endings.get(output[-1], ()) if output else ():
            if tuple(output[1 - len(word) :]) == word[:-1]:
                mask[word[-1] // 32] &= ~np.uint32(1 << word[-1] % 32)
