"""The interface of tokenizer files, and what they share: definitions in the form of ``tokenizer.json``."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from weft.base.errors import InvalidArgumentError

#: Most tokens, and characters of one: the time for merges grows with its square.
MAX_TOKENS, _MAX_TOKEN_CHARS = 2**21, 1024
_BOS, _EOS = "bos_token", "eos_token"


class TokenizerFile(ABC):
    """A file that defines a tokenizer.

    Args:
        path: The file.
        config: The parsed ``tokenizer_config.json`` beside it.

    Attributes:
        file_names: Patterns of the file's name.
        config: ``config``, completed with what the file says of the same fields.
        added_tokens: Tokens that are found in a text before it is split, as in ``tokenizer.json``.

    Raises:
        InvalidArgumentError: The file is truncated, or not of its kind.
    """

    file_names: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config: dict[str, Any] = dict(config)
        self.added_tokens: list[dict[str, Any]] = []

    @classmethod
    def fits(cls, path: Path) -> bool:
        """Whether a file of such a name is of this kind."""
        del path
        return True

    @abstractmethod
    def text(self) -> str:
        """The definition as the text of a ``tokenizer.json``; takes seconds for a large vocabulary."""

    def fault(self, what: str) -> InvalidArgumentError:
        """Error about the file."""
        return InvalidArgumentError(
            f"{self.path} is not a tokenizer: {what}; fetch it again, or put the model's tokenizer.json beside it"
        )

    def complete(self, said: Mapping[str, Any], tokens: Sequence[str], special_ids: Collection[int]) -> None:
        """Set ``config`` and ``added_tokens``: what the file says, but for what ``tokenizer_config.json`` says.

        ``special_ids`` are those of ``tokens`` that are special.
        """
        if len(tokens) > MAX_TOKENS or (longest := max(map(len, tokens), default=0)) > _MAX_TOKEN_CHARS:
            allowed = f"at most {MAX_TOKENS} tokens of {_MAX_TOKEN_CHARS} characters"
            raise self.fault(f"{allowed} are read, got {len(tokens)}, the longest of {longest}")
        if not all(tokens) or len(set(tokens)) != len(tokens):
            raise self.fault("each token must have a text of its own")
        self.config = {**said, **{name: value for name, value in self.config.items() if value is not None}}
        added = {number: added_token(number, tokens[number], is_special=True) for number in sorted(special_ids)}
        own = self.config.get("added_tokens_decoder")
        for number, token in (own if isinstance(own, dict) else {}).items():
            if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not str(number).isdecimal():
                raise self.fault(f"tokenizer_config.json has no content for token {number} of added_tokens_decoder")
            added[int(number)] = added_token(int(number), token["content"]) | token
        self.added_tokens = [added[number] for number in sorted(added)]

    def definition(self, model: Mapping[str, Any], **parts: Any) -> str:
        """The text of a definition with ``added_tokens``, and with what ``config`` puts around a text."""
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": self.added_tokens,
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": self._template(),
                **parts,
                "model": model,
            }
        )

    def _template(self) -> dict[str, Any] | None:
        ids = {token["content"]: token["id"] for token in self.added_tokens}
        names = [self._around(name) for name in (_BOS, _EOS)]
        around = [[{"SpecialToken": {"id": name, "type_id": 0}}] if name else [] for name in names]
        if missing := [name for name in names if name and name not in ids]:
            raise self.fault(f"it has no token {missing[0]!r}, which begins or ends a text")
        single = [*around[0], {"Sequence": {"id": "A", "type_id": 0}}, *around[1]]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names if name},
        }

    def _around(self, name: str) -> str:
        """The text of a special token if it is added to each text, else ""."""
        text = self.config.get(name) if self.config.get(f"add_{name}") else None
        text = text.get("content") if isinstance(text, dict) else text
        return text if isinstance(text, str) else ""


def added_token(token_id: int, text: str, *, is_special: bool = False, is_normalized: bool = False) -> dict[str, Any]:
    """An entry of ``added_tokens``; ``is_normalized``: it is found in the normalized text."""
    rest = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": token_id, "content": text, **rest, "normalized": is_normalized, "special": is_special}


def merges_of(tokens: Iterable[str], known: Collection[str]) -> list[list[str]]:
    """Every pair of ``known`` tokens that makes one of ``tokens``, which come in the order in which they are made."""
    return [
        [token[:at], token[at:]]
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]


def bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    """A BPE model."""
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **more}


def replace(old: str, new: str, *, kind: str = "String") -> dict[str, Any]:
    """A normalizer or decoder; ``kind`` of pattern: ``String`` or ``Regex``."""
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    """A pre-tokenizer that splits at a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def sequence(kind: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Normalizers or so, one after the other; ``kind`` is the field that lists them."""
    return {"type": "Sequence", kind: parts} if parts else None
