"""Byte-level BPE by ranks of bytes: tiktoken's files, and ``tekken.json`` of Mistral."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.tokenizers.definition import MAX_TOKENS, Definition, define, fault, merges_of
from weft.llm.weights.parts import read_object
from weft.serving.detokenizer.stages import BYTE_BY_CHAR

_TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CHARS = {byte: char for char, byte in BYTE_BY_CHAR.items()}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> Definition:
    """Read a file with a token in Base64 and its rank on each line.

    ``pat_str`` of ``config`` splits a text into words. Special tokens are those of ``config``.

    Raises:
        InvalidArgumentError: A line is wrong, the pattern is not known, or a byte is missing; or as ``define``.
    """
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    if wrong := next((line for line in lines if len(line) != 2 or not line[1].isdigit()), None):
        raise fault(path, f"each line must have a token and its rank, got {b' '.join(wrong)[:80]!r}")
    pattern = config.get("pat_str", QWEN2 if path.name == "qwen.tiktoken" else None)
    if not isinstance(pattern, str):
        raise fault(path, f"'pat_str' of tokenizer_config.json must be the pattern that splits it, got {pattern!r}")
    return _define_ranks(path, config, {}, ((data, int(rank)) for data, rank in lines), [], pattern)


def read_tekken(path: Path, config: Mapping[str, Any]) -> Definition:
    """Read ``tekken.json``. Raises InvalidArgumentError: a field is missing or wrong; or as ``define``."""
    parsed: dict[str, Any] = read_object(path) or {}
    try:
        own, vocabulary, special = (parsed[name] for name in ("config", "vocab", "special_tokens"))
        size, num_special = own["default_vocab_size"], own["default_num_special_tokens"]
        if not 0 <= num_special <= size <= MAX_TOKENS:
            raise fault(path, f"it may have {MAX_TOKENS} tokens, special ones included, got {num_special} of {size}")
        texts = {token["rank"]: str(token["token_str"]) for token in special}
        names = [texts.get(number, f"<SPECIAL_{number}>") for number in range(num_special)]
        ranks = [(token["token_bytes"], token["rank"]) for token in vocabulary[: size - num_special]]
        said: dict[str, Any] = {field: text for field, text in _TEKKEN_NAMES.items() if text in names}
        said["add_bos_token"] = "bos_token" in said
        return _define_ranks(path, config, said, ranks, names, str(own["pattern"]))
    except (KeyError, TypeError) as error:
        raise fault(path, f"'config', 'vocab' and 'special_tokens' must be those of tekken ({error})") from error


def _define_ranks(
    path: Path,
    config: Mapping[str, Any],
    said: Mapping[str, Any],
    encoded: Iterable[tuple[str | bytes, int]],
    special: list[str],
    pattern: str,
) -> Definition:
    """Define a tokenizer by tokens in Base64 and their ranks, which begin behind the ``special`` tokens."""
    try:
        ranks = {base64.b64decode(data, validate=True).decode("latin-1").translate(_CHARS): at for data, at in encoded}
    except ValueError as error:
        raise fault(path, f"a token is not Base64 ({error})") from error
    words = sorted(ranks, key=ranks.__getitem__)
    if not set(_CHARS.values()) <= ranks.keys() or len(set(ranks.values())) < len(ranks) or ranks[words[0]] < 0:
        raise fault(path, "it must have each byte as a token, and each rank once")

    def build(config: Mapping[str, Any], library: Any) -> Any:
        vocabulary = {text: number for number, text in enumerate(special)}
        vocabulary |= {text: rank + len(special) for text, rank in ranks.items()}
        model = library.models.BPE(vocabulary, merges_of(words, ranks), ignore_merges=True)
        return byte_level(model, [pattern], library)

    return define(path, config, said, [*special, *words], build, special_ids=range(len(special)))


def byte_level(model: Any, patterns: Sequence[str], library: Any) -> Any:
    """A tokenizer of the package ``library`` for a BPE of bytes; ``patterns`` split a text, one after the other."""
    split = partial(library.pre_tokenizers.Split, behavior="isolated")
    bytes_of_text = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = library.Tokenizer(model)
    splits = [split(library.Regex(pattern)) for pattern in patterns]
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([*splits, bytes_of_text])
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer
