"""Byte-level BPE by ranks of bytes: tiktoken's files, and ``tekken.json`` of Mistral."""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from weft.backends.tokenizers.definition import MAX_TOKENS, TokenizerFile, bpe, merges_of, sequence, split
from weft.llm.weights.parts import read_object
from weft.serving.detokenizer.stages import BYTE_BY_CHAR

_LINE, _MAX_LINE_BYTES = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*"), 4096
_CHARS = {byte: char for char, byte in BYTE_BY_CHAR.items()}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
#: Patterns of files that do not say it, by name; another one is ``pat_str`` of ``tokenizer_config.json``.
_PATTERNS = {"tokenizer.model": LLAMA3, "qwen.tiktoken": QWEN2}


class ByteLevelFile(TokenizerFile):
    """A file of byte-level BPE."""

    def byte_level(self, model: Mapping[str, Any], patterns: Sequence[str], *, normalizer: str = "") -> str:
        """The text of a definition; ``patterns`` split a text into words, one after the other."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return self.definition(
            model,
            normalizer={"type": normalizer} if normalizer else None,
            pre_tokenizer=sequence("pretokenizers", [*map(split, patterns), byte_level]),
            decoder=byte_level,
        )


class _RanksFile(ByteLevelFile):
    _first_id = 0
    _special: Sequence[str] = ()
    _pattern: str

    def complete_ranks(self, encoded: Iterable[tuple[str | bytes, object]], said: Mapping[str, Any]) -> None:
        """Set all attributes from pairs of a token in Base64 and its rank; special tokens come before all others."""
        ranks: dict[str, int] = {}
        try:
            for data, rank in encoded:
                if type(rank) is not int or rank < 0:
                    raise self.fault(f"a rank must be a whole number of at least 0, got {rank!r}")
                text = base64.b64decode(data, validate=True).decode("latin-1").translate(_CHARS)
                ranks[text] = rank + len(self._special)
        except (binascii.Error, TypeError, ValueError) as error:
            raise self.fault(f"a token is not Base64 ({error})") from error
        if not set(_CHARS.values()) <= ranks.keys() or len(set(ranks.values())) < len(ranks):
            raise self.fault("it must have each byte as a token, and each rank once")
        self._ranks = {text: number for number, text in enumerate(self._special)} | ranks
        if len(self._ranks) < len(self._special) + len(ranks):
            raise self.fault("a special token has the text of another token")
        self.complete(said, list(self._ranks), range(len(self._special)))

    @override
    def text(self) -> str:
        words = list(self._ranks)[len(self._special) :]
        merges = merges_of(sorted(words, key=self._ranks.__getitem__), set(words))
        vocabulary = self._ranks | {token["content"]: token["id"] for token in self.added_tokens}
        return self.byte_level(bpe(vocabulary, merges, ignore_merges=True), [self._pattern])


class TiktokenFile(_RanksFile):
    """A token in Base64 and its rank on each line; special tokens are ``tokenizer_config.json``'s."""

    file_names: ClassVar[tuple[str, ...]] = ("*.tiktoken", "tokenizer.model")

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, config)
        pattern = config.get("pat_str") or _PATTERNS.get(path.name)
        if not isinstance(pattern, str):
            raise self.fault(f"'pat_str' of tokenizer_config.json must be the pattern that splits it, got {pattern!r}")
        self._pattern = pattern
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        if wrong := next((line for line in lines if len(line) != 2 or not line[1].isdigit()), None):
            raise self.fault(f"each line must have a token and its rank, got {b' '.join(wrong)[:80]!r}")
        self.complete_ranks(((data, int(rank)) for data, rank in lines), {})

    @override
    @classmethod
    def fits(cls, path: Path) -> bool:
        with path.open("rb") as file:
            return _LINE.fullmatch(file.readline(_MAX_LINE_BYTES)) is not None or path.suffix == ".tiktoken"


class TekkenFile(_RanksFile):
    """``tekken.json``."""

    file_names: ClassVar[tuple[str, ...]] = ("tekken.json",)

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, config)
        parsed = read_object(path) or {}
        own, vocabulary, special = (parsed.get(name) for name in ("config", "vocab", "special_tokens"))
        try:
            self._pattern, size, num_special = (
                own[name] for name in ("pattern", "default_vocab_size", "default_num_special_tokens")
            )
            if not 0 <= num_special <= size <= MAX_TOKENS:
                raise self.fault(f"it may have {MAX_TOKENS} tokens, special ones included, got {num_special} of {size}")
            texts = {token["rank"]: str(token["token_str"]) for token in special}
            fillers = [f"<SPECIAL_{number}>" for number in range(num_special)]
            self._special = [texts.get(number, filler) for number, filler in enumerate(fillers)]
            pairs = [(token["token_bytes"], token["rank"]) for token in vocabulary[: size - num_special]]
        except (KeyError, TypeError) as error:
            raise self.fault(f"'config', 'vocab' and 'special_tokens' must be those of tekken ({error})") from error
        said = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
        self.complete_ranks(pairs, said)
