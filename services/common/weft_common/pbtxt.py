"""Protobuf text format with positions: what was written where, and errors that point at the character.

``google.protobuf.text_format`` decides what is legal. A second, tolerant pass over the same text notes where each field
stands and finds every unknown name at once, with the name that was probably meant.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple, TypeVar, cast

from google.protobuf import text_encoding, text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from weft_common.errors import InvalidArgumentError

M = TypeVar("M", bound=Message)

MAX_FILE_BYTES = 4 << 20
_MAX_DEPTH = 64
_MAX_SHOWN_COLUMNS = 200
_NUM_LISTED_NAMES = 16

_TOKEN = re.compile(
    r"(?P<skip>\s+|\#[^\n]*)"
    r"|(?P<name>[A-Za-z_][0-9A-Za-z_+-]*)"
    r"|(?P<number>[0-9.+-][0-9A-Za-z_.+-]*)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"|(?P<symbol>.)"
)
_CHARACTER = re.compile(r"\\(?:[xX][0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_ERROR_PREFIX = re.compile(r"^\d+(:\d+)? : ('.*': )?", re.DOTALL)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding about a file.

    Attributes:
        file: As given to ``parse``.
        line, column: 1-based, in characters; 0 means unknown.
        message: What is wrong and the cure.
        code: Stable code, for example ``"G011"``; may be "".
        severity: ``"error"`` or ``"warning"``.
        source_line: The line, for the caret; may be "".
    """

    file: str
    line: int
    column: int
    message: str
    code: str = ""
    severity: str = "error"
    source_line: str = ""


class PbtxtError(InvalidArgumentError):
    """A file does not parse. INVALID_ARGUMENT; ``diagnostics`` has every finding, in order of position."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = diagnostics
        super().__init__(render(diagnostics))


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int


class _Place(NamedTuple):
    """Offsets of a field's name and value; ``literals`` are the pieces of a string value."""

    name: int
    value: int
    literals: tuple[_Token, ...] = ()


class Positions:
    """Where each field of a parsed file stands.

    A path is ``node[0].switch.step[2].when``; the value of a map's entry is ``input_map[KEY]``, its key
    ``input_map[KEY].key``. A path that is not in the file falls back to the nearest enclosing one.

    Attributes:
        duplicate_keys: Paths of map entries whose key stands there more than once; protobuf keeps the last.
    """

    def __init__(self, text: str, places: dict[str, _Place], duplicate_keys: tuple[str, ...] = ()) -> None:
        self._text = text
        self._places = places
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.duplicate_keys = duplicate_keys

    def __contains__(self, path: str) -> bool:
        """Whether the file has the field."""
        return path in self._places

    def find(self, path: str) -> tuple[int, int]:
        """Line and column of the field's value; for a message, of its name."""
        place = self._nearest(path)
        return self.at(place.value) if place else (0, 0)

    def find_name(self, path: str) -> tuple[int, int]:
        """Line and column of the field's name."""
        place = self._nearest(path)
        return self.at(place.name) if place else (0, 0)

    def locate(self, path: str, index: int) -> tuple[int, int]:
        """Line and column of character ``index`` of a string value; past its end, of the closing quote."""
        place = self._places.get(path)
        if place is None or not place.literals:
            return self.find(path)
        for literal in place.literals:
            for match in _CHARACTER.finditer(literal.text, 1, len(literal.text) - 1):
                if index == 0:
                    return self.at(literal.offset + match.start())
                index -= 1
        return self.at(literal.offset + len(literal.text) - 1)

    def at(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset into the text."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def source_line(self, line: int) -> str:
        """Text of a line without its end; "" where there is none."""
        if not 1 <= line <= len(self._starts):
            return ""
        start = self._starts[line - 1]
        end = self._text.find("\n", start)
        return self._text[start : end if end >= 0 else None].rstrip("\r")

    def _nearest(self, path: str) -> _Place | None:
        while path and path not in self._places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._places.get(path)


def parse(text: str | bytes, message: M, *, file: str) -> tuple[M, Positions]:
    """Fill ``message`` from a text-format file and note where everything stands.

    Args:
        text: Content of the file; bytes must be UTF-8.
        message: An empty message of the expected type; filled and returned.
        file: Name for diagnostics.

    Raises:
        PbtxtError: Not text, too large, a syntax error, an unknown field or enum value, a value out of range. All
            unknown names are reported at once, each with the name that was probably meant.
    """
    text = _checked_text(text, file)
    scan = _Scan(text)
    scan.run(cast(Descriptor, message.DESCRIPTOR))
    positions = Positions(text, scan.places, tuple(scan.duplicate_keys))
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        findings = dict(scan.findings)
        where = (error.GetLine() or 0, error.GetColumn() or 0)
        if not findings or where < positions.at(min(findings)):
            cause = _ERROR_PREFIX.sub("", str(error)).rstrip(".")
            raise PbtxtError([_diagnostic(file, positions, where, cause)]) from None
        found = [_diagnostic(file, positions, positions.at(at), findings[at]) for at in sorted(findings)]
        raise PbtxtError(found) from None
    except (RecursionError, ValueError, TypeError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else f"not a valid text-format file: {error}"
        raise PbtxtError([Diagnostic(file, 0, 0, cause)]) from None
    return message, positions


def suggestion(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``names``, else what is allowed, else ""."""
    known = [known for known in dict.fromkeys(names) if known]
    close = get_close_matches(name, known, n=1, cutoff=0.6) or [k for k in known if k.lower() == name.lower()]
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; use one of: {', '.join(known)}" if 0 < len(known) <= _NUM_LISTED_NAMES else ""


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """Text for people: ``file:line:column: error: message  [code]``, the source line, a caret under the character."""
    lines: list[str] = []
    for found in diagnostics:
        where = f"{found.file}:{found.line}:{found.column}" if found.line else found.file
        lines.append(f"{where}: {found.severity}: {found.message}" + (f"  [{found.code}]" if found.code else ""))
        if found.source_line and found.column:
            start = max(0, found.column - 1 - _MAX_SHOWN_COLUMNS // 2) if found.column > _MAX_SHOWN_COLUMNS else 0
            shown = found.source_line[start : start + _MAX_SHOWN_COLUMNS]
            lines.append(shown)
            lines.append("".join("\t" if c == "\t" else " " for c in shown[: found.column - 1 - start]) + "^")
    return "\n".join(lines)


def _checked_text(content: str | bytes, file: str) -> str:
    if len(content) > MAX_FILE_BYTES:
        cause = f"the file has {len(content)} bytes, the limit is {MAX_FILE_BYTES}; it should hold text, not data"
        raise PbtxtError([Diagnostic(file, 0, 0, cause)])
    try:
        text = content.decode() if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        cause = f"not UTF-8 text: byte 0x{error.object[error.start]:02x}; save the file as UTF-8"
        raise PbtxtError([Diagnostic(file, *_end_of(error.object[: error.start].decode()), cause)]) from None
    if "\0" in text:
        cause = "a binary file: it has a NUL byte; protobuf text format is plain text"
        raise PbtxtError([Diagnostic(file, *_end_of(text[: text.index("\0")]), cause)])
    return text


def _end_of(text: str) -> tuple[int, int]:
    """Line and column of the character after ``text``."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def _diagnostic(file: str, positions: Positions, where: tuple[int, int], message: str) -> Diagnostic:
    return Diagnostic(file, *where, message, source_line=positions.source_line(where[0]))


class _StopScanError(Exception):
    """The text is not what this pass understands; ``text_format`` will say why."""


class _Scan:
    """The tolerant pass: places of fields, unknown names."""

    def __init__(self, text: str) -> None:
        self._tokens = [
            _Token(match.lastgroup or "", match.group(), match.start())
            for match in _TOKEN.finditer(text)
            if match.lastgroup != "skip"
        ]
        self._next = 0
        self.places: dict[str, _Place] = {}
        self.findings: list[tuple[int, str]] = []
        self.duplicate_keys: list[str] = []

    def run(self, descriptor: Descriptor) -> None:
        """Fill ``places``, ``findings`` and ``duplicate_keys`` as far as the text makes sense."""
        try:
            self._fields(descriptor, "", "", 0)
        except _StopScanError:
            return

    def _peek(self) -> _Token:
        if self._next == len(self._tokens):
            return _Token("end", "", -1)
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += 1
        return token

    def _fields(self, descriptor: Descriptor | None, prefix: str, closing: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _StopScanError
        num_seen: Counter[str] = Counter()
        while True:
            token = self._take()
            if token.text == closing:
                return
            if token.text in (",", ";"):
                continue
            if token.kind != "name":
                raise _StopScanError
            field = descriptor.fields_by_name.get(token.text) if descriptor else None
            if descriptor and not field:
                known = suggestion(token.text, descriptor.fields_by_name)
                self.findings.append((token.offset, f"unknown field '{token.text}' in {descriptor.name}{known}"))
            if self._peek().text == ":":
                self._take()
            self._values(field, token, prefix + token.text, num_seen, depth)

    def _values(self, field: FieldDescriptor | None, name: _Token, path: str, seen: Counter[str], depth: int) -> None:
        is_list = self._peek().text == "["
        if is_list:
            self._take()
        while not (is_list and self._peek().text == "]"):
            where = path
            if field and field.is_repeated and not is_map(field):
                where = f"{path}[{seen[name.text]}]"
                seen[name.text] += 1
            self._value(field, name, where, depth, is_listed=is_list)
            if field:
                self.places.setdefault(path, self.places.get(where, _Place(name.offset, name.offset)))
            if not is_list:
                return
            if self._peek().text == ",":
                self._take()
        self._take()

    def _value(self, field: FieldDescriptor | None, name: _Token, path: str, depth: int, *, is_listed: bool) -> None:
        token = self._take()
        if token.text in _CLOSING:
            at = token.offset if is_listed else name.offset
            if field and is_map(field):
                self._map_entry(field, path, at, _CLOSING[token.text], depth)
                return
            if field:
                self.places[path] = _Place(at, at)
            self._fields(field.message_type if field else None, path + ".", _CLOSING[token.text], depth + 1)
            return
        literals: list[_Token] = []
        if token.kind == "string":
            literals.append(token)
            while self._peek().kind == "string":
                literals.append(self._take())
        elif token.kind not in ("name", "number"):
            raise _StopScanError
        enum: EnumDescriptor | None = field.enum_type if field else None
        if enum and token.kind == "name" and token.text not in enum.values_by_name:
            known = suggestion(token.text, enum.values_by_name)
            self.findings.append((token.offset, f"unknown value '{token.text}' of {enum.name}{known}"))
        if field:
            self.places[path] = _Place(name.offset, token.offset, tuple(literals))

    def _map_entry(self, field: FieldDescriptor, path: str, at: int, closing: str, depth: int) -> None:
        outer, self.places = self.places, {}
        self._fields(field.message_type, "", closing, depth + 1)
        inner, self.places = self.places, outer
        key_place = inner.get("key", _Place(at, at))
        key = "".join(_plain(literal) for literal in key_place.literals)
        entry = f"{path}[{key}]"
        if entry in outer:
            self.duplicate_keys.append(entry)
        outer[entry] = _Place(at, at)
        outer[entry + ".key"] = key_place
        for name, place in inner.items():
            if name == "value" or name.startswith("value."):
                outer[entry + name.removeprefix("value")] = place


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a protobuf map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _plain(literal: _Token) -> str:
    try:
        return text_encoding.CUnescape(literal.text[1:-1]).decode()
    except (ValueError, UnicodeError):
        return literal.text[1:-1]
