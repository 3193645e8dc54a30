"""The ids before a piece of text that its own text depends on."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.serving.detokenizer.detokenizer import Detokenizer

_MIN_IDS = 64


class Demand(NamedTuple):
    """What the text of a piece depends on.

    Attributes:
        skips_special_tokens: Whether tokens such as ``</s>`` give no text.
        num_chars: So many characters before the piece must be known, for a stop string that began there.
        is_last: Whether the text ends with the piece.
    """

    skips_special_tokens: bool
    num_chars: int
    is_last: bool


def enough_of(
    detokenizer: Detokenizer, before: Sequence[int], ids: Sequence[int], demand: Demand
) -> Sequence[int] | None:
    """The last of ``before`` that ``is_enough`` for ``ids``: 64, or twice or four times that, and so on.

    None if only all of them are, which may then not be enough without what was before those. For an answer of n tokens
    in any pieces this is ``O(n * (64 + num_chars))`` ids in all: no piece but the few behind a long run of bytes or of
    skipped tokens needs to reach over that run.
    """
    size = _MIN_IDS
    while size < len(before):
        if is_enough(detokenizer, before[-size:], ids, demand):
            return before[-size:]
        size *= 2
    return None


def is_enough(detokenizer: Detokenizer, context: Sequence[int], ids: Sequence[int], demand: Demand) -> bool:
    """Whether ``ids`` add the same text after ``context`` as after anything that ends with it.

    It is so where the decoder is in the same state after ``context``, whatever was before, and the last ``num_chars``
    characters are the same too; and where ``ids`` surely give no text yet.
    """
    state = _Settling(detokenizer)
    tokens = detokenizer.tokens(context, skip_special_tokens=demand.skips_special_tokens)
    num_settling = state.settle(tokens)
    if state.is_settled and (not demand.num_chars or state.num_chars(tokens[num_settling:]) >= demand.num_chars):
        return True
    if demand.is_last:
        return False
    return state.keeps(detokenizer.tokens(ids, skip_special_tokens=demand.skips_special_tokens))


class _Settling:
    """The stages of a stream that begins somewhere in a text, and how many of them are as if it had seen all of it."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._new_stages = detokenizer.new_stages
        self._stages = self._new_stages()
        self._num_settled = 0
        self._settle_by_now()

    @property
    def is_settled(self) -> bool:
        return self._num_settled == len(self._stages)

    def settle(self, tokens: Sequence[str]) -> int:
        """Number of tokens that were pushed until all stages were settled; all, if they are not."""
        for number, token in enumerate(tokens):
            if self.is_settled:
                return number
            pieces = [token]
            for stage in self._stages:
                pieces = stage.push(pieces)
            self._settle_by_now()
        return len(tokens)

    def num_chars(self, tokens: list[str]) -> int:
        """Number of characters that the tokens give; all stages must be settled."""
        for stage in self._stages:
            tokens = stage.push(tokens)
        return sum(map(len, tokens))

    def keeps(self, tokens: list[str]) -> bool:
        """Whether a stage keeps back all that the tokens give, whatever was before. Nothing may be pushed then."""
        pieces = tokens
        for stage in self._stages[: self._num_settled]:
            pieces = stage.push(pieces)
        if self.is_settled or not pieces:
            return not pieces
        stage = self._stages[self._num_settled]
        stage.push(pieces)
        return stage.is_silent_until_settled and not stage.is_settled

    def _settle_by_now(self) -> None:
        while not self.is_settled and self._stages[self._num_settled].is_settled:
            self._num_settled += 1
            # What the next stages were given so far may have been wrong.
            self._stages[self._num_settled :] = self._new_stages()[self._num_settled :]
