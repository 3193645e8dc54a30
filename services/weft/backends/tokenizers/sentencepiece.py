"""SentencePiece models, in ``tokenizer.model`` or in a GGUF file."""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf.message import DecodeError
from typing_extensions import override

from weft.backends.tokenizers.definition import TokenizerFile, added_token, bpe, merges_of, replace, sequence, split
from weft_protos.sentencepiece_pb2 import ModelProto, TrainerSpec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = range(1, 7)
_SPACE = "\u2581"
_NUM_BYTES = 256


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
    charsmap: bytes = b""

    def of_type(self, *types: int) -> list[int]:
        """Ids of the pieces of these types."""
        return [number for number, kind in enumerate(self.types) if kind in types]


class PiecesFile(TokenizerFile):
    """A file with ``pieces``.

    Ids are those of SentencePiece for BPE. For unigram it may be another segmentation of the same score, and
    replacements of characters are looked up for whole grapheme clusters, as in ``tokenizers``.
    """

    pieces: Pieces

    def complete_pieces(self, pieces: Pieces, said: Mapping[str, Any]) -> None:
        """Check ``pieces`` and set all attributes, given what the file says of ``tokenizer_config.json``."""
        self.pieces = pieces
        counts = {len(pieces.texts), len(pieces.scores), len(pieces.types)}
        if len(counts) > 1 or not all(map(math.isfinite, pieces.scores)):
            raise self.fault("it must have a finite score and a type for each token")
        if (num_bytes := len(pieces.of_type(BYTE))) not in (0, _NUM_BYTES):
            raise self.fault(f"it must have a piece for each of {_NUM_BYTES} bytes or for none, got {num_bytes}")
        self.complete(said, pieces.texts, pieces.of_type(UNKNOWN, CONTROL))
        known = {token["id"] for token in self.added_tokens}
        user_defined = [number for number in pieces.of_type(USER_DEFINED) if number not in known]
        self.added_tokens += [added_token(each, pieces.texts[each], is_normalized=True) for each in user_defined]
        self.added_tokens.sort(key=lambda token: int(token["id"]))
        last = len(pieces.texts) - 1
        for number, token in enumerate((each for each in self.added_tokens if each["id"] > last), last + 1):
            if token["id"] != number:
                raise self.fault(f"added token {token['content']!r} must have the next id, {number}, got {token['id']}")

    @override
    def text(self) -> str:
        pieces, decoders = self.pieces, [replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
        adds_prefix = self.config.get("add_prefix_space")
        adds_prefix = pieces.adds_prefix if adds_prefix is None else bool(adds_prefix)
        normalizers, splits = self._normalizers(), []
        if adds_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
            if self.config.get("legacy") is False:  # at the beginning of the text, not behind each special token
                # There are no spaces any more, so that Metaspace does not take one for its own.
                for mark, scheme in ((" ", "first"), (_SPACE, "never")):
                    splits.append({"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": False})
            else:
                # A symbol as such stays as it is: it is normalized to be found in normalized texts.
                symbols = "|".join(re.escape(pieces.texts[number]) for number in pieces.of_type(USER_DEFINED))
                normalizers.append(replace(rf"\A(?!(?:{symbols})\z)", _SPACE, kind="Regex"))
        if pieces.is_unigram:
            splits += self._reserved_splits()
        return self.definition(
            self._model(),
            normalizer=sequence("normalizers", normalizers),
            pre_tokenizer=sequence("pretokenizers", splits),
            decoder=sequence("decoders", decoders),
        )

    def _normalizers(self) -> list[dict[str, Any]]:
        normalizers = [replace(" ", _SPACE)]
        if self.pieces.charsmap:
            charsmap = base64.b64encode(self.pieces.charsmap).decode()
            normalizers.insert(0, {"type": "Precompiled", "precompiled_charsmap": charsmap})
        if self.pieces.removes_spaces:
            normalizers.append(replace(rf"\A{_SPACE}+|{_SPACE}+\z", "", kind="Regex"))
            normalizers.append(replace(f"{_SPACE}{{2,}}", _SPACE, kind="Regex"))
        return normalizers

    def _reserved_splits(self) -> list[dict[str, Any]]:
        """Splits the texts of control tokens and bytes, which must not be found in a text."""
        reserved = [self.pieces.texts[number] for number in self.pieces.of_type(UNKNOWN, CONTROL, BYTE)]
        parts = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in reserved if len(text) > 1]
        return [split("|".join(parts), "MergedWithPrevious")] if parts else []

    def _model(self) -> dict[str, Any]:
        pieces = self.pieces
        unknown = pieces.of_type(UNKNOWN)[:1]
        fallback = {"byte_fallback": bool(pieces.of_type(BYTE))}
        if pieces.is_unigram:
            scored = list(zip(pieces.texts, map(float, pieces.scores), strict=True))
            return {"type": "Unigram", "unk_id": unknown[0] if unknown else None, "vocab": scored, **fallback}
        vocabulary = {text: number for number, text in enumerate(pieces.texts)}
        normal = sorted(pieces.of_type(NORMAL), key=lambda number: -pieces.scores[number])
        texts = [pieces.texts[number] for number in normal]
        unk_token = pieces.texts[unknown[0]] if unknown else None
        return bpe(vocabulary, merges_of(texts, set(texts)), unk_token=unk_token, fuse_unk=True, **fallback)


class SentencePieceFile(PiecesFile):
    """``tokenizer.model``."""

    file_names: ClassVar[tuple[str, ...]] = ("tokenizer.model",)

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, config)
        try:
            proto = ModelProto.FromString(path.read_bytes())
        except DecodeError as error:
            raise self.fault(f"it is no SentencePiece model ({error})") from error
        trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
        name = TrainerSpec.ModelType.Name(trainer.model_type)
        if not proto.pieces or name not in ("UNIGRAM", "BPE"):
            raise self.fault(f"it must be a SentencePiece model, BPE or UNIGRAM, with pieces, got {name}")
        if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
            raise self.fault("treat_whitespace_as_suffix must be false and escape_whitespaces true")
        texts = [piece.piece for piece in proto.pieces]
        ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
        said = {name: texts[number] for name, number in ids.items() if 0 <= number < len(texts)}
        pieces = Pieces(
            texts,
            [piece.score for piece in proto.pieces],
            [piece.type for piece in proto.pieces],
            is_unigram=name == "UNIGRAM",
            adds_prefix=normalizer.add_dummy_prefix,
            removes_spaces=normalizer.remove_extra_whitespaces,
            charsmap=normalizer.precompiled_charsmap,
        )
        self.complete_pieces(pieces, {"add_bos_token": "bos_token" in said, **said})
