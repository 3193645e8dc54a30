"""The decoders of Hugging Face ``tokenizers``, as streams.

There a decoder maps all tokens of a text at once, ``[token] -> [piece]``, and a sequence of decoders is their
composition. A stage does the same incrementally: the results of ``push`` and ``finish``, joined, equal the decoder's
result for all tokens. A stage keeps back only what later tokens can still change.

Source:
    https://github.com/huggingface/tokenizers, ``tokenizers/src/decoders`` and ``src/pre_tokenizers``.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from weft.base.errors import InvalidArgumentError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_REPLACEMENT = "\ufffd"
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
#: GPT-2's byte-level alphabet.
BYTE_BY_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
# Of a character of UTF-8 after its first. After so many bytes a decoder waits for the same, whatever was before them.
_MAX_MISSING_BYTES = 3
# What WordPiece's cleanup replaces, in this order.
_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Stage(Protocol):
    """One decoder of a chain, with the state of one stream.

    If ``is_silent_until_settled``, it gives no text until ``is_settled``.
    """

    is_silent_until_settled: ClassVar[bool]

    @property
    def is_settled(self) -> bool:
        """Whether other tokens before the pushed ones would lead to the same state."""

    def push(self, tokens: list[str]) -> list[str]:
        """Add tokens; return pieces that no later token changes."""

    def finish(self) -> list[str]:
        """Return the pieces that were kept back."""


class _FirstDiffers:
    """Maps the first token of the stream in one way, all others in another; or every token alike."""

    is_silent_until_settled: ClassVar[bool] = False

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str] | None = None) -> None:
        self._first, self._later = first, later or first
        self.is_settled = later is None

    def push(self, tokens: list[str]) -> list[str]:
        if self.is_settled or not tokens:
            return [self._later(token) for token in tokens]
        self.is_settled = True
        return [self._first(tokens[0]), *(self._later(token) for token in tokens[1:])]

    def finish(self) -> list[str]:
        return []


class _LastDiffers:
    """Maps the last token of the stream in one way, all others in another; keeps one token back."""

    is_silent_until_settled: ClassVar[bool] = False

    def __init__(self, last: Callable[[str], str], earlier: Callable[[str], str]) -> None:
        self._last, self._earlier = last, earlier
        self._kept: list[str] = []

    @property
    def is_settled(self) -> bool:
        return bool(self._kept)

    def push(self, tokens: list[str]) -> list[str]:
        known = self._kept + tokens
        self._kept = known[-1:]
        return [self._earlier(token) for token in known[:-1]]

    def finish(self) -> list[str]:
        kept, self._kept = self._kept, []
        return [self._last(token) for token in kept]


class _ByteLevel:
    """Every character of a token is a byte; the bytes of all tokens are UTF-8. Keeps back an incomplete character."""

    is_silent_until_settled: ClassVar[bool] = False

    def __init__(self, bytes_of: Callable[[str], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_bytes = 0

    @property
    def is_settled(self) -> bool:
        return self._num_bytes >= _MAX_MISSING_BYTES

    def push(self, tokens: list[str]) -> list[str]:
        data = b"".join(map(self._bytes_of, tokens))
        self._num_bytes += len(data)
        return [self._decoder.decode(data)]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


class _ByteFallback:
    """Tokens such as ``<0xE4>`` are bytes.

    A run of them that is not UTF-8 becomes as many replacement characters as it has bytes, so a run is kept back until
    it ends.
    """

    is_silent_until_settled: ClassVar[bool] = True

    def __init__(self) -> None:
        self._run = bytearray()
        self.is_settled = False

    def push(self, tokens: list[str]) -> list[str]:
        pieces: list[str] = []
        for token in tokens:
            if match := _BYTE_TOKEN.fullmatch(token):
                self._run.append(int(match[1], 16))
            else:
                pieces += self.finish()
                pieces.append(token)
                self.is_settled = True
        return pieces

    def finish(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


class _StripText:
    """Strips up to ``limit`` characters ``content`` from the beginning of the text."""

    is_silent_until_settled: ClassVar[bool] = False

    def __init__(self, content: str, limit: int) -> None:
        self._content = content
        self._num_left = limit

    @property
    def is_settled(self) -> bool:
        return not self._num_left

    def push(self, tokens: list[str]) -> list[str]:
        return [self._stripped(token) if self._num_left else token for token in tokens]

    def finish(self) -> list[str]:
        return []

    def _stripped(self, piece: str) -> str:
        rest = _without_prefix(piece, self._content, self._num_left)
        self._num_left = 0 if rest else self._num_left - len(piece)
        return rest


def stages_of(decoder: Mapping[str, Any] | None) -> list[Callable[[], Stage]]:
    """Return constructors of one stream's stages, in order, for ``decoder`` of a ``tokenizer.json``.

    None joins tokens with spaces. Raises InvalidArgumentError for a decoder, or its place in a sequence, that cannot be
    streamed.
    """
    if decoder is None:
        return [lambda: _FirstDiffers(_same, lambda token: f" {token}")]
    sequence = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    factories: list[Callable[[], Stage]] = []
    is_fused = False  # what follows takes the whole text for one token
    for part in sequence:
        if part["type"] == "Fuse":
            is_fused = True
            continue
        factory = _factory(part, is_fused)
        if factory is None:
            raise InvalidArgumentError(
                f"the tokenizer's decoder {part}{' after Fuse or ByteLevel' if is_fused else ''} cannot be streamed; "
                "ByteLevel, Metaspace, WordPiece, BPEDecoder, ByteFallback, Fuse, Replace of a string and Strip of the "
                "beginning can be"
            )
        factories.append(factory)
        is_fused = is_fused or part["type"] == "ByteLevel"
    return factories


def _factory(part: Mapping[str, Any], is_fused: bool) -> Callable[[], Stage] | None:
    kind = part["type"]
    if kind == "Replace" and (pattern := part["pattern"].get("String")) and (len(pattern) == 1 or not is_fused):
        return lambda: _FirstDiffers(lambda token: token.replace(pattern, part["content"]))
    if kind == "Strip" and part["stop"] == 0:
        content, limit = part["content"], part["start"]
        if is_fused:
            return lambda: _StripText(content, limit)
        return lambda: _FirstDiffers(lambda token: _without_prefix(token, content, limit))
    return None if is_fused else _unfused_factory(part)


def _unfused_factory(part: Mapping[str, Any]) -> Callable[[], Stage] | None:
    kind = part["type"]
    if kind == "ByteLevel":
        bytes_of = _bytes_by_token().__getitem__
        return lambda: _ByteLevel(bytes_of)
    if kind == "ByteFallback":
        return _ByteFallback
    if kind == "Metaspace":
        mark = part["replacement"]
        first = "" if part.get("prepend_scheme", "always") != "never" else " "
        return lambda: _FirstDiffers(lambda token: token.replace(mark, first), lambda token: token.replace(mark, " "))
    if kind == "WordPiece":
        cleaned = _cleaned if part["cleanup"] else _same
        prefix = part["prefix"]
        return lambda: _FirstDiffers(
            cleaned,
            lambda token: cleaned(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"),
        )
    if kind == "BPEDecoder":
        suffix = part["suffix"]
        return lambda: _LastDiffers(lambda token: token.replace(suffix, ""), lambda token: token.replace(suffix, " "))
    return None


def _bytes_by_token() -> dict[str, bytes]:
    """Bytes of a token of GPT-2's byte-level alphabet, filled as tokens are met; of any other token its UTF-8."""

    class _Table(dict[str, bytes]):
        def __missing__(self, token: str) -> bytes:
            known = all(char in BYTE_BY_CHAR for char in token)
            self[token] = value = bytes(BYTE_BY_CHAR[char] for char in token) if known else token.encode()
            return value

    return _Table()


def bytes_of_token(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes | None]:
    """Return a function from a token to its bytes, if the decoder treats some tokens as bytes; else None."""
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _bytes_by_token().__getitem__
    if "ByteFallback" not in kinds:
        return lambda token: None
    return lambda token: bytes([int(match[1], 16)]) if (match := _BYTE_TOKEN.fullmatch(token)) else None


def _without_prefix(text: str, content: str, limit: int) -> str:
    start = 0
    while start < min(limit, len(text)) and text[start] == content:
        start += 1
    return text[start:]


def _cleaned(token: str) -> str:
    for old, new in _CLEANUP:
        token = token.replace(old, new)
    return token


def _same(token: str) -> str:
    return token
