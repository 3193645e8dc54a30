"""The tokenizer inside a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.backends.tokenizers.definition import Definition, define, fault
from weft.backends.tokenizers.sentencepiece import CONTROL, NORMAL, TYPES, UNKNOWN, UNUSED, USER_DEFINED, define_pieces
from weft.backends.tokenizers.tiktoken import LLAMA3, QWEN2, byte_level
from weft.llm.weights.gguf import GgufFile
from weft_protos.sentencepiece_pb2 import ModelProto, TrainerSpec

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
#: Kinds of vocabularies with scores, as models of SentencePiece.
_SCORED = {"llama": TrainerSpec.BPE, "t5": TrainerSpec.UNIGRAM}
_PREFIX = "tokenizer.ggml."
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_gguf(path: Path, config: Mapping[str, Any]) -> Definition | None:
    """Read the metadata ``tokenizer.ggml``; None if there are none.

    Raises:
        InvalidArgumentError: The kind or the pre-tokenizer is not known, or metadata are missing or wrong; or as
            ``define``.
    """
    with GgufFile.open(path) as file:
        found = {name.removeprefix(_PREFIX): value for name, value in file.metadata.items()}
    kind, name = str(found.get("model", "none")), str(found.get("pre"))
    if kind in ("none", "no_vocab"):
        return None
    pre_tokenizer = _PRE_TOKENIZERS.get(name, _PreTokenizer(()))
    if kind not in _SCORED and (kind != "gpt2" or not pre_tokenizer.patterns):
        raise fault(
            path,
            f"{_PREFIX}model must be {' or '.join(_SCORED)}, or gpt2 with a 'pre' of {', '.join(_PRE_TOKENIZERS)}, got "
            f"{kind!r} with {name!r}",
        )
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(_list(path, found, "tokens", str))]
    types = _list(path, found, "token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or not tokens:
        raise fault(path, f"it must have a type for each token, got {len(types)} for {len(tokens)}")
    ids = {field: found.get(f"{special}_token_id") for special, field in _SPECIAL.items()}
    said = {field: tokens[each] for field, each in ids.items() if type(each) is int and 0 <= each < len(tokens)}
    adds = {"bos": kind == "llama" or pre_tokenizer.adds_bos, "eos": kind == "t5"}
    said |= {f"add_{each}_token": bool(found.get(f"add_{each}_token", default)) for each, default in adds.items()}
    said["chat_template"] = found.get("tokenizer.chat_template")
    if kind in _SCORED:
        scores = _list(path, found, "scores", float)
        if len(scores) != len(tokens):
            raise fault(path, f"it must have a score for each token, got {len(scores)} for {len(tokens)}")
        proto = ModelProto()
        for text, score, each in zip(tokens, scores, types, strict=True):
            proto.pieces.add(piece=text, score=score, type=each if each in TYPES else UNUSED)
        proto.trainer_spec.model_type = _SCORED[kind]
        proto.normalizer_spec.add_dummy_prefix = bool(found.get("add_space_prefix", kind == "llama"))
        proto.normalizer_spec.remove_extra_whitespaces = bool(found.get("remove_extra_whitespaces", False))
        proto.normalizer_spec.precompiled_charsmap = bytes(
            code % 256 for code in _list(path, found, "precompiled_charsmap", int)
        )
        return define_pieces(path, config, said, proto)
    merges = [(text[:at], text[at + 1 :]) for text in _list(path, found, "merges", str) for at in [text.find(" ", 1)]]

    def build(config: Mapping[str, Any], library: Any) -> Any:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        model = library.models.BPE(vocabulary, merges, ignore_merges=pre_tokenizer.takes_words)
        tokenizer = byte_level(model, pre_tokenizer.patterns, library)
        if pre_tokenizer.normalizer:
            tokenizer.normalizer = getattr(library.normalizers, pre_tokenizer.normalizer)()
        return tokenizer

    special = [number for number, each in enumerate(types) if each in (UNKNOWN, CONTROL)]
    symbols = [number for number, each in enumerate(types) if each == USER_DEFINED]
    return define(path, config, said, tokens, build, special_ids=special, symbol_ids=symbols)


def _list(path: Path, found: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """An array of the metadata; [] if there is none."""
    values = found.get(name, [])
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise fault(path, f"{_PREFIX}{name} must be an array of {kind.__name__}")
    return values
