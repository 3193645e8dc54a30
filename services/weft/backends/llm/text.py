"""Tokenizer of a model: text to token ids and back."""

import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.backends.tokenizers import Definition, find_tokenizer, load_tokenizer
from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import any_of
from weft.llm.grammar import TokenTable
from weft.serving.detokenizer import Detokenizer

#: Cached token texts; ``logprobs`` shows the same tokens over and over.
_NUM_CACHED_TEXTS = 65536


class ShownToken(NamedTuple):
    """A token as shown in ``logprobs``: its text and bytes in the middle of a text, so with its leading space.

    Bytes that form no character are U+FFFD in the text.
    """

    text: str
    data: list[int]


class TextCodec:
    """The tokenizer of a model. Thread-safe.

    ``shown_token`` returns the ``ShownToken`` of a token id.

    Args:
        definition: Its truncation and padding are ignored: a prompt is encoded whole.
        max_text_bytes: Limit of a text, in bytes of UTF-8.

    Raises:
        InvalidArgumentError: The file is not a tokenizer, or its decoder cannot be streamed.
        UnavailableError: The package ``tokenizers`` is not installed.
    """

    def __init__(self, definition: Definition, max_text_bytes: int) -> None:
        self._tokenizer: Any = load_tokenizer(definition, "torch")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_text_bytes = max_text_bytes
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        self._special = re.compile(any_of(special))
        self.detokenizer = Detokenizer(self._tokenizer)
        self.shown_token = lru_cache(_NUM_CACHED_TEXTS)(self._shown_token)

    @classmethod
    def from_folder(cls, directory: Path, max_text_bytes: int) -> "TextCodec | None":
        """The tokenizer of a model's folder; None if it has none. Raises like the constructor."""
        definition = find_tokenizer(directory)
        return None if definition is None else cls(definition, max_text_bytes)

    def ids(
        self, text: bytes, name: str, *, adds_special_tokens: bool, parses_special_tokens: bool
    ) -> tuple[str, npt.NDArray[np.int32]]:
        """Decode and tokenize UTF-8; returns the decoded text and its token ids.

        Args:
            text: UTF-8.
            name: Name of the input, for errors.
            adds_special_tokens: Whether to add tokens such as ``<s>``, as the tokenizer defines.
            parses_special_tokens: Whether a special token in the text is one; else it is text like any other.

        Raises:
            InvalidArgumentError: It is not UTF-8, too long, or the tokenizer rejects it.
        """
        if len(text) > self._max_text_bytes:
            raise InvalidArgumentError(
                f"input '{name}' has {len(text)} bytes; at most {self._max_text_bytes} are allowed: shorten it, or "
                "raise parameter 'max_text_bytes' of the model"
            )
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"input '{name}' is not UTF-8: {error.reason} at byte {error.start} of {len(text)}; send UTF-8, or "
                "token ids as 'input_ids'"
            ) from None
        try:
            has_tokens = not parses_special_tokens and self._special.search(decoded) is not None
            tokenizer = self._plain if has_tokens else self._tokenizer
            encoding = tokenizer.encode(decoded, add_special_tokens=adds_special_tokens)
        except Exception as error:  # tokenizers raises nothing more specific
            raise InvalidArgumentError(f"input '{name}': the tokenizer refuses the text: {error}") from None
        return decoded, np.array(encoding.ids, np.int32)

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer for which special tokens in a text are text; made for the first text that has one."""
        plain = self._tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def token_table(self, vocab_size: int) -> TokenTable:
        """The bytes of the first ``vocab_size`` ids; 0.6 s for 131,072."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return TokenTable(
            [self.detokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            [token_id for token_id, token in added if token.special and token_id < vocab_size],
            lambda text: list(self._plain.encode(text, add_special_tokens=False).ids),
        )

    def text(self, ids: npt.NDArray[np.int32]) -> str:
        """Detokenize ids, without special tokens."""
        return str(self._tokenizer.decode(ids.tolist()))

    def whole_text(self, ids: npt.NDArray[np.int32]) -> str:
        """Detokenize ids, with special tokens. Raises InvalidArgumentError for an id that the tokenizer lacks."""
        for token_id in np.unique(ids).tolist():
            if token_id < 0 or self._tokenizer.id_to_token(token_id) is None:
                raise InvalidArgumentError(f"token id {token_id} is none of the tokenizer's")
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _shown_token(self, token_id: int) -> ShownToken:
        data = self.detokenizer.token_bytes(token_id)
        return ShownToken(data.decode(errors="replace"), list(data))
