"""Messages and fields of a text that is being typed, and therefore does not parse."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from typing_extensions import override

from weft.base.text.pbtxt_scan import MAX_DEPTH, PbtxtToken, Scan, StopScanError

_OPENING = ("{", "<", "[")


class GivenField(NamedTuple):
    """A field.

    Attributes:
        start, end: Where its value is, or is missing; ``start`` is -1 where no colon calls for one.
        value: Where what is given begins, with the bracket of a list.
        blocks: Messages that are its values.
    """

    name: PbtxtToken
    type: FieldDescriptor | None
    start: int
    end: int
    value: int
    blocks: "list[Block]"


@dataclass(slots=True)
class Block:
    """A message between two offsets.

    Attributes:
        type: None: the message around it has no such field.
        path: Of its fields, with a dot behind it; "" for the file and for the entry of a map.
    """

    type: Descriptor | None
    path: str
    depth: int
    start: int
    end: int
    given: list[GivenField] = field(default_factory=list)


class _MissingValueError(Exception):
    """Something else is where a value belongs."""


class Outline(Scan):
    """What a text says, as far as it says something.

    Args:
        message: Gets the fields that are sound.

    Attributes:
        blocks: Messages in the order in which they begin, first the file.
    """

    def __init__(self, text: str, message: Any) -> None:
        super().__init__(text)
        self.blocks: list[Block] = []
        self._unsound: list[tuple[int, int]] = []
        self._is_sound = True  # the value that is read
        self.run(message.DESCRIPTOR)
        characters = list(text)
        for start, end in self._unsound:
            characters[start:end] = " " * (end - start)
        try:
            text_format.Merge("".join(characters), message)
        except (text_format.ParseError, RecursionError, ValueError):
            return  # the message has what is before it

    @property
    def _end(self) -> int:
        """Offset behind the token that was taken last."""
        token = self._tokens[self._next - 1]
        return token.offset + len(token.text)

    @override
    def _find(self, offset: int, message: str) -> None:
        self._is_sound = False

    @override
    def _fields(
        self, descriptor: Descriptor | None, prefix: str, closing: str, depth: int, opening: tuple[int, str] = (0, "")
    ) -> None:
        if depth > MAX_DEPTH:
            raise StopScanError
        block = Block(descriptor, prefix, depth, self._end if depth else -1, len(self._text) + 1)
        self.blocks.append(block)
        num_seen: Counter[str] = Counter()
        while self._next < len(self._tokens):
            token, colon = self._take(), self._peek().text
            if token.text == closing:
                block.end = token.offset
                return
            if token.kind != "name" or colon not in (":", "=", *_OPENING):
                self._unsound.append((token.offset, self._end))
                continue
            known = descriptor.fields_by_name.get(token.text) if descriptor else None
            if colon not in _OPENING:
                self._take()
            start, num_taken, num_blocks = self._end, self._next, len(self.blocks)
            try:
                self._values(known, token, prefix + token.text, num_seen, depth)
            except _MissingValueError:
                self._is_sound = False
            following = self._peek().offset if self._next < len(self._tokens) else block.end
            end, value = following, following
            if self._next > num_taken:
                end, value = self._end, self._tokens[num_taken].offset
            inner = [one for one in self.blocks[num_blocks:] if one.depth == depth + 1]
            block.given.append(GivenField(token, known, -1 if colon in _OPENING else start, end, value, inner))
            if known is None or colon == "=" or not self._is_sound:
                self._unsound.append((token.offset, self._end))
            self._is_sound = True

    @override
    def _value(
        self, field: FieldDescriptor | None, name: PbtxtToken, path: str, depth: int, *, is_listed: bool
    ) -> None:
        token, behind = (self._tokens[self._next : self._next + 2] + [PbtxtToken("end", "", -1)] * 2)[:2]
        is_field = token.kind == "name" and behind.text in (":", "=", "{")
        if is_field or not (token.kind in ("name", "number", "string") or token.text in ("{", "<")):
            raise _MissingValueError
        super()._value(field, name, path, depth, is_listed=is_listed)
