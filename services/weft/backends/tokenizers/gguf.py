"""The tokenizer inside a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from weft.backends.tokenizers.definition import added_token, bpe
from weft.backends.tokenizers.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Pieces, PiecesFile
from weft.backends.tokenizers.tiktoken import LLAMA3, QWEN2, ByteLevelFile
from weft.llm.weights.gguf import GgufFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(contraction: str, digits: str) -> str:
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{contraction}" for a, b in ("*+", "+*")]
    return "|".join([*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"])


class _PreTokenizer(NamedTuple):
    """How ``tokenizer.ggml.pre`` splits a text into words.

    Attributes:
        takes_words: A word that is a token is that token, whatever merges make of it.
    """

    patterns: tuple[str, ...]
    takes_words: bool = False
    adds_bos: bool = False
    normalizer: str = ""


_LLAMA3 = _PreTokenizer((LLAMA3,), takes_words=True, adds_bos=True)
_CL100K, _DIGITS = _PreTokenizer((LLAMA3,)), _PreTokenizer((r"\p{N}", _GPT2))
_PRE_TOKENIZERS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _PreTokenizer((QWEN2,), normalizer="NFC")),
    **dict.fromkeys(("refact", "starcoder", "command-r", "smollm"), _DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _PreTokenizer((_GPT2,))),
    **dict.fromkeys(("gpt-4o", "llama4"), _PreTokenizer((_by_case("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),))),
    "tekken": _PreTokenizer((_by_case("", r"\p{N}"),), takes_words=True, adds_bos=True),
}
#: Kinds of vocabularies with scores, and whether they are unigram.
_SCORED = {"llama": False, "t5": True}
_SPECIAL = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk_token", "padding": "pad_token"}


class GgufTokenizerFile(PiecesFile, ByteLevelFile):
    """The metadata ``tokenizer.ggml``."""

    file_names: ClassVar[tuple[str, ...]] = ("*.gguf",)

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, config)
        with GgufFile.open(path) as file:
            metadata = file.metadata
        self._found = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
        kind = self._found.get("model")
        tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(self._list("tokens", str))]
        types = self._list("token_type", int) if "token_type" in self._found else [NORMAL] * len(tokens)
        if len(types) != len(tokens) or not tokens:
            raise self.fault(f"it must have a type for each token, got {len(types)} for {len(tokens)}")
        ids = {name: self._found.get(f"{name}_token_id") for name in _SPECIAL}
        said = {
            _NAMES.get(name, f"{name}_token"): tokens[number]
            for name, number in ids.items()
            if type(number) is int and 0 <= number < len(tokens)
        }
        said["chat_template"] = metadata.get("tokenizer.chat_template")
        self._tokens, self._pre_tokenizer = tokens, None
        if kind in _SCORED:
            pieces = Pieces(
                tokens,
                self._list("scores", float),
                types,
                is_unigram=_SCORED[kind],
                adds_prefix=bool(self._found.get("add_space_prefix", kind == "llama")),
                removes_spaces=bool(self._found.get("remove_extra_whitespaces", False)),
                charsmap=bytes(self._list("precompiled_charsmap", int)),
            )
            self.complete_pieces(pieces, said | self._around_texts(adds_bos=kind == "llama", adds_eos=kind == "t5"))
            return
        name = self._found.get("pre")
        self._pre_tokenizer = pre_tokenizer = _PRE_TOKENIZERS.get(name) if kind == "gpt2" else None
        if pre_tokenizer is None:
            raise self.fault(
                f"tokenizer.ggml.model must be one of {', '.join(_SCORED)} or gpt2 with a 'pre' of "
                f"{', '.join(_PRE_TOKENIZERS)}, got {kind!r} with {name!r}"
            )
        special = [number for number, each in enumerate(types) if each in (UNKNOWN, CONTROL)]
        self.complete(said | self._around_texts(adds_bos=pre_tokenizer.adds_bos, adds_eos=False), tokens, special)
        known = {token["id"] for token in self.added_tokens}
        self.added_tokens += [
            added_token(number, tokens[number])
            for number, each in enumerate(types)
            if each == USER_DEFINED and number not in known
        ]
        self._merges = [(text[:at], text[at + 1 :]) for text in self._list("merges", str) for at in [text.find(" ", 1)]]

    @override
    def text(self) -> str:
        if self._pre_tokenizer is None:
            return super().text()
        model = bpe(
            {token: number for number, token in enumerate(self._tokens)},
            self._merges,
            ignore_merges=self._pre_tokenizer.takes_words,
        )
        return self.byte_level(model, self._pre_tokenizer.patterns, normalizer=self._pre_tokenizer.normalizer)

    def _around_texts(self, *, adds_bos: bool, adds_eos: bool) -> dict[str, bool]:
        defaults = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
        return {name: bool(self._found.get(name, default)) for name, default in defaults.items()}

    def _list(self, name: str, kind: type) -> list[Any]:
        """An array of the metadata; [] if there is none."""
        values = self._found.get(name, [])
        values = values.tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.fault(f"tokenizer.ggml.{name} must be an array of {kind.__name__}")
        return values
