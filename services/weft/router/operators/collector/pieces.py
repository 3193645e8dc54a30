"""Puts the responses of a stream together to pieces: joins tensors, and finds the ends of sentences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.base.errors import InternalError, ResourceExhaustedError
from weft.base.tensors import WireTensor, bytes_tensor, decode, encode, num_elements, split_bytes
from weft.language.plan import Frame

#: Most bytes that are joined, where the file does not say.
DEFAULT_MAX_BYTES = 1 << 20

_CLOSING = rb"(?:[\"')\]]|\xe2\x80\x9d|\xe2\x80\x99|\xc2\xbb){0,3}"
_SENTENCE_END = re.compile(rb"[.!?]" + _CLOSING + rb"\s|\xe3\x80\x82|\xef\xbc\x81|\xef\xbc\x9f|\n")
#: Length of the longest match but one byte: of which a later response may bring the rest.
_MAX_BEGUN_BYTES = 10
_INK = re.compile(rb"\S")


class SentenceBuffer:
    """Text of which whole sentences are taken; where they end does not depend on how it came."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._text = bytearray()
        self._is_blank = True
        self._scanned = 0

    def __len__(self) -> int:
        return len(self._text)

    def add(self, text: bytes) -> None:
        """Append text."""
        self._text += text

    def take(self) -> bytes | None:
        """Remove the first sentence, with white space behind it, or ``max_bytes`` of a longer one; None: no end yet."""
        end = self._end()
        if not end and len(self._text) <= self._max_bytes:
            return None
        if not end or end > self._max_bytes:
            end = self._max_bytes - self._begun_bytes(self._max_bytes)
        return self.take_all(end)

    def take_all(self, end: int | None = None) -> bytes:
        """Remove everything, or what stands before ``end``."""
        taken = bytes(self._text[:end])
        del self._text[:end]
        self._is_blank, self._scanned = True, 0
        return taken

    def _begun_bytes(self, end: int) -> int:
        """Bytes before ``end`` of a character that goes on behind it; 0: of none, or it is no UTF-8."""
        begun = 0
        while begun < min(4, end - 1) and end - begun < len(self._text) and self._text[end - begun] & 0xC0 == 0x80:
            begun += 1
        return begun if begun < 4 else 0

    def _end(self) -> int:
        """End of the first sentence, which is not blank; 0: none."""
        if self._is_blank:
            ink = _INK.search(self._text, self._scanned)
            self._is_blank, self._scanned = ink is None, len(self._text) if ink is None else ink.start()
        found = None if self._is_blank else _SENTENCE_END.search(self._text, self._scanned)
        if not self._is_blank:
            self._scanned = max(self._scanned, len(self._text) - _MAX_BEGUN_BYTES)
        return found.end() if found else 0


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What a collector joins, and where its pieces end: at a sentence, after ``count`` responses, else with the stream.

    Attributes:
        joins: Slots whose values are joined, with the number of dims before which a batch dimension may stand.
        kept: Slots of which the last value counts.
        text: The slot whose sentences end pieces; -1: none.
        count: Responses in a piece; 0: any number.
    """

    joins: tuple[tuple[int, int], ...] = ()
    kept: tuple[int, ...] = ()
    text: int = -1
    count: int = 0
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether the stream is one piece."""
        return self.text < 0 and not self.count


#: Of a plan that is not complete yet.
NOTHING = CollectorSettings()


class Pieces:
    """Pieces of one stream; memory is bounded by ``max_bytes`` and one response."""

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._sentences = SentenceBuffer(settings.max_bytes)
        self._text: WireTensor | None = None  # the latest, for its shape
        self._latest: Frame = []
        self._clear()

    @property
    def is_pending(self) -> bool:
        """Whether something has come that is in no piece yet."""
        return self._num_responses > 0 or len(self._sentences) > 0

    def add(self, frame: Frame) -> Iterator[Frame]:
        """Take a response, whose frame is kept, and yield the pieces that it completes.

        Raises:
            InternalError: Tensors of two responses cannot be joined.
            ResourceExhaustedError: The whole stream comes to more than ``max_bytes``.
        """
        settings = self._settings
        for slot in settings.kept:
            if frame[slot] is None and self._num_responses:
                frame[slot] = self._latest[slot]
        self._latest = frame
        self._num_responses += 1
        for slot, _ in settings.joins:
            tensor = frame[slot]
            if tensor is None:
                continue
            if slot == settings.text:
                self._add_text(tensor)
            else:
                self._parts[slot].append(tensor)
                self._num_bytes += len(tensor.data)
        if settings.is_whole and self._num_bytes > settings.max_bytes:
            raise ResourceExhaustedError(
                f"the stream has more than {settings.max_bytes} bytes; let the model give less, or raise 'max_bytes'"
            )
        while len(self._sentences) and (sentence := self._sentences.take()) is not None:
            yield self._piece(sentence)
        is_full = not settings.is_whole and self._num_bytes >= settings.max_bytes
        if is_full or (settings.count and self._num_responses >= settings.count):
            yield self._piece()

    def rest(self) -> Frame | None:
        """What the end of the stream makes a piece of, if anything has come since the last."""
        return self._piece() if self.is_pending else None

    def _clear(self) -> None:
        self._parts: dict[int, list[WireTensor]] = {slot: [] for slot, _ in self._settings.joins}
        self._num_bytes = 0
        self._num_responses = 0

    def _add_text(self, tensor: WireTensor) -> None:
        elements = split_bytes(tensor.data)
        if len(elements) != 1:
            raise InternalError(
                f"a response has {len(elements)} texts, of shape {list(tensor.shape)}, and sentences are those of one; "
                "send one row in each request"
            )
        self._text = tensor
        self._sentences.add(elements[0])

    def _piece(self, sentence: bytes | None = None) -> Frame:
        frame = self._latest.copy()
        for slot, num_dims in self._settings.joins:
            if slot != self._settings.text:
                frame[slot] = _joined(self._parts[slot], self._latest[slot], num_dims)
            elif self._text is not None:
                text = self._sentences.take_all() if sentence is None else sentence
                frame[slot] = bytes_tensor([text], self._text.shape)
        self._clear()
        return frame


def _joined(parts: list[WireTensor], latest: WireTensor | None, num_dims: int) -> WireTensor | None:
    """The values of one tensor in the responses of a piece; empty ones for a piece within a response."""
    if not parts:
        return None if latest is None else _empty(latest, num_dims)
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.datatype == "BYTES":
        _check_alike(parts, 0)
        texts = zip(*(split_bytes(one.data) for one in parts), strict=True)
        return bytes_tensor([b"".join(text) for text in texts], first.shape)
    axis = len(first.shape) - num_dims
    _check_alike([one._replace(shape=(*one.shape[:axis], *one.shape[axis + 1 :])) for one in parts], axis)
    return encode(np.concatenate([decode(one) for one in parts], axis))


def _empty(tensor: WireTensor, num_dims: int) -> WireTensor:
    if tensor.datatype == "BYTES":
        return bytes_tensor([b""] * num_elements(tensor.shape), tensor.shape)
    axis = len(tensor.shape) - num_dims
    return WireTensor(tensor.datatype, (*tensor.shape[:axis], 0, *tensor.shape[axis + 1 :]), b"")


def _check_alike(parts: list[WireTensor], axis: int) -> None:
    other = next((one for one in parts if one[:2] != parts[0][:2]), None)
    if other is not None:
        raise InternalError(
            f"two responses do not make one tensor: {parts[0].datatype}{list(parts[0].shape)} and "
            f"{other.datatype}{list(other.shape)}, dimension {axis} left out of numbers"
        )
