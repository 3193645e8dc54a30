"""SentencePiece models, in ``tokenizer.model`` or in a GGUF file."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from weft.backends.tokenizers.definition import Definition, define, fault, merges_of
from weft_protos.sentencepiece_pb2 import ModelProto, TrainerSpec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = range(1, 7)
_SPACE = "\u2581"


@dataclass(frozen=True)
class Pieces:
    """A vocabulary with scores.

    Attributes:
        types: By the numbers of SentencePiece, which GGUF has too.
        is_unigram: Likeliest segmentation; else BPE, better scores first.
        adds_prefix: A text begins with a space.
        charsmap: Precompiled replacements of characters; b"": none.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    is_unigram: bool
    adds_prefix: bool
    removes_spaces: bool
    charsmap: bytes

    def of_type(self, *types: int) -> list[int]:
        """Ids of the pieces of these types."""
        return [number for number, kind in enumerate(self.types) if kind in types]


def read_sentencepiece(path: Path, config: Mapping[str, Any]) -> Definition:
    """Read ``tokenizer.model``. Raises as ``define_pieces``."""
    try:
        proto = ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise fault(path, f"it is no SentencePiece model ({error})") from error
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    name = TrainerSpec.ModelType.Name(trainer.model_type)
    if not proto.pieces or name not in ("UNIGRAM", "BPE"):
        raise fault(path, f"it must be a SentencePiece model, BPE or UNIGRAM, with pieces, got {name}")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise fault(path, "treat_whitespace_as_suffix must be false and escape_whitespaces true")
    texts, scores, types = zip(*((piece.piece, piece.score, piece.type) for piece in proto.pieces), strict=True)
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
    said = {name: texts[number] for name, number in ids.items() if 0 <= number < len(texts)}
    pieces = Pieces(
        *(texts, scores, types, name == "UNIGRAM", normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces),
        normalizer.precompiled_charsmap,
    )
    return define_pieces(path, config, {"add_bos_token": "bos_token" in said, **said}, pieces)


def define_pieces(path: Path, config: Mapping[str, Any], said: Mapping[str, Any], pieces: Pieces) -> Definition:
    """Define a tokenizer of pieces; other arguments as of ``define``.

    Ids are those of SentencePiece for BPE. For unigram it may be another segmentation of the same score, and
    replacements of characters are looked up for whole grapheme clusters, as in ``tokenizers``.

    Raises:
        InvalidArgumentError: A score or type is missing, or the bytes are incomplete; or as ``define``.
    """
    counts = {len(pieces.texts), len(pieces.scores), len(pieces.types)}
    if len(counts) > 1 or not all(map(math.isfinite, pieces.scores)):
        raise fault(path, "it must have a finite score and a type for each token")
    if (num_bytes := len(pieces.of_type(BYTE))) not in (0, 256):
        raise fault(path, f"it must have a piece for each of 256 bytes or for none, got {num_bytes}")
    return define(
        *(path, config, said, pieces.texts, partial(_build, pieces)),
        special_ids=pieces.of_type(UNKNOWN, CONTROL),
        symbol_ids=pieces.of_type(USER_DEFINED),
        is_normalized=True,
    )


def _build(pieces: Pieces, config: Mapping[str, Any], library: Any) -> Any:
    normalizers, splits, decoders, regex = library.normalizers, [], library.decoders, library.Regex
    steps = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    steps.append(normalizers.Replace(" ", _SPACE))
    if pieces.removes_spaces:
        steps.append(normalizers.Replace(regex(rf"\A{_SPACE}+|{_SPACE}+\z"), ""))
        steps.append(normalizers.Replace(regex(f"{_SPACE}{{2,}}"), _SPACE))
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_prefix = config.get("add_prefix_space")
    if pieces.adds_prefix if adds_prefix is None else adds_prefix:
        back.append(decoders.Strip(" ", 1, 0))
        if config.get("legacy") is False:  # at the beginning of the text, not behind each special token
            # There are no spaces any more, so that Metaspace does not take one for its own.
            for mark, scheme in ((" ", "first"), (_SPACE, "never")):
                splits.append(library.pre_tokenizers.Metaspace(mark, prepend_scheme=scheme, split=False))
        else:
            # A symbol alone stays as it is: it is normalized to be found in normalized texts.
            symbols = "|".join(re.escape(pieces.texts[number]) for number in pieces.of_type(USER_DEFINED))
            steps.append(normalizers.Replace(regex(rf"\A(?!(?:{symbols})\z)"), _SPACE))
    if pieces.is_unigram:  # whose trie has all pieces: those that are no text are split
        reserved = [pieces.texts[number] for number in pieces.of_type(UNKNOWN, CONTROL, BYTE)]
        parts = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in reserved if len(text) > 1]
        splits.append(library.pre_tokenizers.Split(regex("|".join(parts) or r"\z."), "merged_with_previous"))
    tokenizer = library.Tokenizer(_model(pieces, library.models))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(back)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(splits)
    return tokenizer


def _model(pieces: Pieces, models: Any) -> Any:
    unknown, has_bytes = pieces.of_type(UNKNOWN), bool(pieces.of_type(BYTE))
    if pieces.is_unigram:
        scored = [(text, float(score)) for text, score in zip(pieces.texts, pieces.scores, strict=True)]
        return models.Unigram(scored, unk_id=unknown[0] if unknown else None, byte_fallback=has_bytes)
    texts = [pieces.texts[number] for number in sorted(pieces.of_type(NORMAL), key=lambda each: -pieces.scores[each])]
    return models.BPE(
        {text: number for number, text in enumerate(pieces.texts)},
        merges_of(texts, set(texts)),
        unk_token=pieces.texts[unknown[0]] if unknown else None,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
