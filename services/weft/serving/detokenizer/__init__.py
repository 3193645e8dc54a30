"""Streams text from token ids, equal to the text of all ids decoded at once.

``DecodeStream`` of ``tokenizers`` is not used: it raises "Invalid prefix encountered" on ids that decode to invalid
UTF-8 (vllm#17448), and repeats the prompt's text after one that ends inside a character (vllm#48853, open).
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer.stages import bytes_of_token, stages_of

#: Ids of a prompt that a stream reads: more than any character has bytes.
_NUM_CONTEXT_IDS = 64
_MAX_ID = 2**32 - 1
_MIN_IDS = 64


class StopStrings:
    """Passes text through up to the first stop string, which is dropped and stored in ``stopped_by``.

    The first is the one that ends first, as if the text came character by character; of those that end together, the
    longest. So the result does not depend on how the text is cut. Text that may begin a stop string is kept back.
    Raises InvalidArgumentError for an empty stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidArgumentError("a stop string must have at least one character, got ''")
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._kept = ""

    @property
    def max_kept_chars(self) -> int:
        """Most characters that may be kept back; the result depends on no earlier ones."""
        return max(self._longest - 1, 0)

    def push(self, text: str) -> str:
        """Add text; return what certainly comes before any stop string."""
        if self.stopped_by is not None:
            return ""
        if not self._stop:
            return text
        text = self._kept + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            self._kept = ""
            return text[:start]
        num_kept = self._num_kept(text)
        self._kept = text[len(text) - num_kept :]
        return text[: len(text) - num_kept]

    def finish(self) -> str:
        """End the text; return what was kept back."""
        kept, self._kept = self._kept, ""
        return kept

    def _num_kept(self, text: str) -> int:
        for length in range(min(self.max_kept_chars, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """Creates streams for one ``tokenizers.Tokenizer``; thread-safe. Raises InvalidArgumentError for its decoder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str())["decoder"]
        self._stages = stages_of(decoder)
        self._bytes_of_token = bytes_of_token(decoder)
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = {token.content for token in added}
        self._special = {token.content for token in added if token.special}
        self._tokens: dict[int, str | None] = {}

    def stream(
        self, *, skip_special_tokens: bool = True, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> "TextStream":
        """A new stream; see ``TextStream``."""
        return TextStream(self, skip_special_tokens=skip_special_tokens, stop=stop, prompt_ids=prompt_ids)

    def new_stages(self) -> list[Any]:
        """New decoder stages for one stream."""
        return [stage() for stage in self._stages]

    def tokens(self, ids: Sequence[int], *, skip_special_tokens: bool) -> list[str]:
        """The tokens of ``ids`` in the vocabulary. Raises InvalidArgumentError for an id below 0 or above 2**32 - 1."""
        known = self._tokens
        tokens = [known[token_id] if token_id in known else self._look_up(token_id) for token_id in ids]
        if skip_special_tokens:
            return [token for token in tokens if token is not None and token not in self._special]
        return [token for token in tokens if token is not None]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text, possibly parts of characters; b"" for an unknown one."""
        for token in self.tokens([token_id], skip_special_tokens=False):
            found = None if token in self._added else self._bytes_of_token(token)
            if found is not None:
                return found
        stream = self.stream(skip_special_tokens=False, prompt_ids=[token_id])
        return (stream.push([token_id]) + stream.finish()).encode()

    def _look_up(self, token_id: int) -> str | None:
        if not 0 <= token_id <= _MAX_ID:
            raise InvalidArgumentError(f"token id {token_id} must be from 0 to {_MAX_ID}")
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is not None:  # the cache is as large as the vocabulary at most
            self._tokens[token_id] = token
        return token


class TextStream:
    """The text of a growing sequence of token ids; not thread-safe.

    The results of ``push`` and ``finish``, joined, equal ``tokenizer.decode(ids)`` of all ids, up to the first stop
    string (see ``StopStrings``). ``push`` returns only what later ids cannot change: characters whose bytes lie in
    several tokens come whole, and text that may become a stop string waits. The text continues that of ``prompt_ids``
    (the last 64) without repeating it: the first word keeps its leading space, which a text of its own would lose.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stages = detokenizer.new_stages()
        self._stop = StopStrings(stop)
        self._has_ended = False
        self._repeated = ""
        if prompt_ids:
            self._repeated = self._kept_of(prompt_ids[-_NUM_CONTEXT_IDS:])

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stop.stopped_by

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the new text that is certain now, "" after a stop string.

        Raises InvalidArgumentError for an id below 0 or above 2**32 - 1, which leaves the stream unchanged, and
        ValueError after ``finish``.
        """
        if self._has_ended:
            raise ValueError("push after finish: the stream has ended; make a new one")
        if self._stop.stopped_by is not None:
            return ""
        return self._stop.push(self._continued(self._text_of(ids)))

    def finish(self) -> str:
        """The rest of the text; "" if called again."""
        if self._has_ended:
            return ""
        self._has_ended = True
        return self._stop.push(self._continued(self._rest())) + self._stop.finish()

    def _text_of(self, ids: Sequence[int]) -> str:
        pieces = self._detokenizer.tokens(ids, skip_special_tokens=self._skip_special_tokens)
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def _rest(self) -> str:
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [*stage.push(pieces), *stage.finish()]
        return "".join(pieces)

    def _kept_of(self, prompt_ids: Sequence[int]) -> str:
        """What the stages kept back of the prompt and will still give, although the prompt's own text has it."""
        whole = TextStream(self._detokenizer, skip_special_tokens=self._skip_special_tokens)
        text = whole.push(prompt_ids) + whole.finish()
        return text[len(self._text_of(prompt_ids)) :]

    def _continued(self, text: str) -> str:
        if self._repeated and text:
            text, self._repeated = text.removeprefix(self._repeated), ""
        return text


class Demand(NamedTuple):
    """What the text of a piece may depend on.

    Attributes:
        skips_special_tokens: Tokens such as ``</s>`` give no text.
        num_chars: Characters before the piece that are needed, for a stop string that began there.
        is_last: The text ends with the piece.
    """

    skips_special_tokens: bool
    num_chars: int
    is_last: bool


def enough_of(
    detokenizer: Detokenizer, before: Sequence[int], ids: Sequence[int], demand: Demand
) -> Sequence[int] | None:
    """Return the shortest tail of ``before``, of 64 ids or a power-of-two multiple, that ``is_enough`` for ``ids``.

    None if only all of ``before`` might be enough. An answer of n tokens in any pieces costs ``O(n * (64 +
    num_chars))`` ids in all: only pieces behind a long run of byte tokens or skipped tokens need to reach over that
    run.
    """
    size = _MIN_IDS
    while size < len(before):
        if is_enough(detokenizer, before[-size:], ids, demand):
            return before[-size:]
        size *= 2
    return None


def is_enough(detokenizer: Detokenizer, context: Sequence[int], ids: Sequence[int], demand: Demand) -> bool:
    """Whether ``ids`` add the same text after ``context`` as after any longer context that ends with it.

    That holds if the decoder's state and the last ``num_chars`` characters are the same, or ``ids`` give no text yet.
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
        for number, token in enumerate(tokens):
            if self.is_settled:
                return number
            pieces = [token]
            for stage in self._stages:
                pieces = stage.push(pieces)
            self._settle_by_now()
        return len(tokens)

    def num_chars(self, tokens: list[str]) -> int:
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
