"""SentencePiece models, in ``tokenizer.model`` or in a GGUF file."""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from weft.backends.tokenizers.definition import Definition, define, fault, merges_of
from weft_protos.sentencepiece_pb2 import ModelProto, TrainerSpec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, _BYTE = TYPES = range(1, 7)
_SPACE = "\u2581"


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
    texts = [piece.piece for piece in proto.pieces]
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
    said = {name: texts[number] for name, number in ids.items() if 0 <= number < len(texts)}
    return define_pieces(path, config, {"add_bos_token": "bos_token" in said, **said}, proto)


def define_pieces(path: Path, config: Mapping[str, Any], said: Mapping[str, Any], proto: ModelProto) -> Definition:
    """Define a tokenizer by a SentencePiece model; other arguments as of ``define``.

    Ids are those of SentencePiece for BPE. For unigram it may be another segmentation of the same score, and
    replacements of characters are looked up for whole grapheme clusters, as in ``tokenizers``.

    Raises:
        InvalidArgumentError: A score is not finite, or bytes are incomplete; or as ``define``.
    """
    if not all(math.isfinite(piece.score) for piece in proto.pieces):
        raise fault(path, "it must have a finite score for each token")
    if (num_bytes := len(_of_type(proto, _BYTE))) not in (0, 256):
        raise fault(path, f"it must have a piece for each of 256 bytes or for none, got {num_bytes}")
    return define(
        *(path, config, said, [piece.piece for piece in proto.pieces], partial(_build, proto)),
        special_ids=_of_type(proto, UNKNOWN, CONTROL),
        symbol_ids=_of_type(proto, USER_DEFINED),
        is_normalized=True,
    )


def _of_type(proto: ModelProto, *types: int) -> dict[int, str]:
    """Pieces of these types by id."""
    return {number: piece.piece for number, piece in enumerate(proto.pieces) if piece.type in types}


def _build(proto: ModelProto, config: Mapping[str, Any], library: Any) -> Any:
    spec = proto.normalizer_spec
    normalizers, splits, decoders, regex = library.normalizers, [], library.decoders, library.Regex
    steps = [_charsmap(spec.precompiled_charsmap, normalizers)] if spec.precompiled_charsmap else []
    steps.append(normalizers.Replace(" ", _SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(regex(rf"\A{_SPACE}+|{_SPACE}+\z"), ""))
        steps.append(normalizers.Replace(regex(f"{_SPACE}{{2,}}"), _SPACE))
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_prefix = config.get("add_prefix_space")
    if spec.add_dummy_prefix if adds_prefix is None else adds_prefix:
        back.append(decoders.Strip(" ", 1, 0))
        if config.get("legacy") is False:  # at the beginning of the text, not behind each special token
            # There are no spaces any more, so that Metaspace does not take one for its own.
            for mark, scheme in ((" ", "first"), (_SPACE, "never")):
                splits.append(library.pre_tokenizers.Metaspace(mark, prepend_scheme=scheme, split=False))
        else:
            # A symbol alone stays as it is: it is normalized to be found in normalized texts.
            symbols = "|".join(map(re.escape, _of_type(proto, USER_DEFINED).values()))
            steps.append(normalizers.Replace(regex(rf"\A(?!(?:{symbols})\z)"), _SPACE))
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM:  # its trie has all pieces: what is no text is split
        reserved = _of_type(proto, UNKNOWN, CONTROL, _BYTE).values()
        parts = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in reserved if len(text) > 1]
        splits.append(library.pre_tokenizers.Split(regex("|".join(parts) or r"\z."), "merged_with_previous"))
    tokenizer = library.Tokenizer(_model(proto, library.models))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(back)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(splits)
    return tokenizer


def _charsmap(data: bytes, normalizers: Any) -> Any:
    """The normalizer of a table of characters. Raises ValueError: it is damaged, on which `tokenizers` would panic.

    It is a size, a double array of so many bytes, and texts that end with a zero. Bit 8 of a unit of the array says
    that the unit at its offset, which is joined by exclusive or, holds the place of a text.
    """
    size = int.from_bytes(data[:4], "little")
    units, texts = np.frombuffer(data[4 : 4 + size - size % 4], "<u4"), np.frombuffer(data[4 + size :], np.uint8)
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    bases = np.arange(len(units), dtype=np.uint32) ^ offsets
    is_node = units < 1 << 31
    is_whole = len(data) >= 4 + size and size and size % 4 == 0 and texts.size and not texts[-1]
    if is_whole and ((bases | 0xFF)[is_node] < len(units)).all():
        places = units[bases[is_node & ((units >> 8) & 1 == 1)]] & 0x7FFFFFFF
        if (places < texts.size).all() and (texts[places] & 0xC0 != 0x80).all():
            return normalizers.Precompiled(data)
    raise ValueError("its precompiled_charsmap is damaged; take the file anew from where the model comes from")


def _model(proto: ModelProto, models: Any) -> Any:
    unknown, has_bytes = _of_type(proto, UNKNOWN), bool(_of_type(proto, _BYTE))
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scored, unk_id=next(iter(unknown), None), byte_fallback=has_bytes)
    normal = sorted((piece for piece in proto.pieces if piece.type == NORMAL), key=lambda piece: -piece.score)
    texts = [piece.piece for piece in normal]
    return models.BPE(
        {piece.piece: number for number, piece in enumerate(proto.pieces)},
        merges_of(texts, set(texts)),
        unk_token=next(iter(unknown.values()), None),
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
