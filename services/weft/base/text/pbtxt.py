"""Protobuf text format with source positions and precise diagnostics.

``google.protobuf.text_format`` decides what is valid. A second, tolerant pass over the same text (``pbtxt_scan``)
records the position of each field and finds all unknown names at once, with spelling suggestions.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt_scan import TOKEN, FieldSpan, Scan, is_map
from weft.base.text.suggestion import suggestion

__all__ = [
    "MAX_FILE_BYTES",
    "Diagnostic",
    "PbtxtError",
    "Positions",
    "is_map",
    "parse",
    "render",
    "suggestion",
]

M = TypeVar("M", bound=Message)

MAX_FILE_BYTES = 4 << 20
_MAX_SHOWN_COLUMNS = 200

_CHARACTER = re.compile(r"\\(?:[xX][0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_YAML = re.compile(r"^(?:---|apiVersion:)", re.MULTILINE)
_ERROR_PREFIX = re.compile(r"^\d+(:\d+)? : ('.*': )?", re.DOTALL)
#: Messages of ``text_format``, and clearer ones.
_PLAIN_CAUSES = [
    (re.compile(r"Expected identifier or number, got \}"), "this '}' closes nothing; leave it out"),
    (re.compile(r"Expected identifier or number, got /"), "no field begins with '/'; a comment begins with '#'"),
    (
        re.compile(r"Expected identifier or number, got ([{\[])"),
        r"a field begins with its name, not with '\1'; this is protobuf text format, not JSON",
    ),
    (re.compile(r"Expected identifier or number, got (.*)"), r"a field's name is expected here, got \1"),
    (re.compile(r"Couldn't parse (?:integer|float|double): (.*)"), r"a number is expected here, got \1"),
    (re.compile(r"'unicodeescape' codec .*"), r"not an escape such as '\\n' or '\\x41'; write '\\\\' for a backslash"),
    (re.compile(r"Couldn't parse string: 'utf-8' codec .*"), "the text is not UTF-8 once its escapes are read"),
    (re.compile(r"String missing ending quote: (.*)"), r"the closing quote of \1 is missing"),
    (re.compile(r"Message type \".*\" should not have multiple \"(.*)\" fields"), r"'\1' is given already; keep one"),
    (
        re.compile(r"Field \"(.*)\" is specified along with field \"(.*)\", another member of oneof .*"),
        r"'\1' cannot stand beside '\2'; keep one of them",
    ),
]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding in a file.

    Attributes:
        line, column: 1-based, in characters; 0 means unknown.
        code: Stable code, for example ``"G011"``; may be "".
        severity: ``"error"``, ``"warning"`` or ``"info"``.
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


class Positions:
    """Source positions of the fields of a parsed file.

    A path is ``node[0].switch.step[2].when``; the value of a map's entry is ``input_map[KEY]``, its key
    ``input_map[KEY].key``. A path that is not in the file falls back to the nearest enclosing one.

    Attributes:
        duplicate_keys: Paths of map entries with duplicate keys; protobuf uses the last.
    """

    def __init__(self, text: str, places: dict[str, FieldSpan], duplicate_keys: tuple[str, ...] = ()) -> None:
        self.text = text
        self._places = places
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.duplicate_keys = duplicate_keys
        self._characters: dict[str, list[int]] = {}  # by path, the offset of each character of a string

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

    def locate(self, path: str, index: int | None) -> tuple[int, int]:
        """As ``find``, or of character ``index`` of a string value; past its end, of the closing quote."""
        place = self._places.get(path)
        if index is None or place is None or not place.literals:
            return self.find(path)
        offsets = self._characters.get(path)
        if offsets is None:
            offsets = self._characters[path] = [
                literal.offset + match.start()
                for literal in place.literals
                for match in _CHARACTER.finditer(literal.text, 1, len(literal.text) - 1)
            ]
        last = place.literals[-1]
        return self.at(offsets[index] if index < len(offsets) else last.offset + len(last.text) - 1)

    def at(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset into the text."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def path_at(self, line: int, column: int) -> str:
        """Path of the innermost field whose name or value begins at a place, or last before it; "" before the first."""
        offset = self._starts[line - 1] + column - 1 if 0 < line <= len(self._starts) else -1
        begun = (
            (max(at for at in place[:2] if at <= offset), path)
            for path, place in self._places.items()
            if place.name <= offset
        )
        return max(begun, default=(0, ""))[1]

    def source_line(self, line: int) -> str:
        """Text of a line without its line break; "" if there is none."""
        if not 1 <= line <= len(self._starts):
            return ""
        start = self._starts[line - 1]
        end = self.text.find("\n", start)
        return self.text[start : end if end >= 0 else None].rstrip("\r")

    def replaced(self, values: Mapping[str, str]) -> str:
        """The text with these values of scalar fields; one that is not there comes first in its message."""
        edits = []
        for path, value in values.items():
            field = path.rpartition(".")[2]
            if path in self._places:
                at = self._places[path].value
                edits.append((at, scalar.end() if (scalar := TOKEN.match(self.text, at)) else at, value))
            else:
                inside = path.removesuffix(field)
                at = min(place.name for name, place in self._places.items() if name.startswith(inside))
                edits.append((at, at, f"{field}: {value} "))
        text = self.text
        for start, end, value in sorted(edits, reverse=True):
            text = text[:start] + value + text[end:]
        return text

    def _nearest(self, path: str) -> FieldSpan | None:
        while path and path not in self._places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._places.get(path)


def parse(text: str | bytes, message: M, *, file: str) -> tuple[M, Positions]:
    """Parse a text-format file into ``message`` and record positions.

    Args:
        text: Content of the file; bytes must be UTF-8.
        message: An empty message of the expected type; filled and returned.

    Raises:
        PbtxtError: Not text, too large, a syntax error, an unknown field or enum value, a value out of range. All
            unknown names are reported at once, each with a suggestion.
    """
    text = _checked_text(text, file)
    scan = Scan(text)
    scan.run(cast(Descriptor, message.DESCRIPTOR))
    positions = Positions(text, scan.places, tuple(scan.duplicate_keys))
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, RecursionError, ValueError, TypeError) as error:
        raise PbtxtError(_diagnostics(error, file, dict(reversed(scan.findings)), positions)) from None
    if scan.unknown_numbers:
        found = sorted(scan.unknown_numbers.items())
        raise PbtxtError([diagnostic(file, positions, positions.at(at), text) for at, text in found])
    return message, positions


def render(diagnostics: Iterable[Diagnostic]) -> str:
    """Human-readable text: ``file:line:column: error: message  [code]``, the source line, a caret."""
    lines: list[str] = []
    for found in diagnostics:
        where = f"{found.file}:{found.line}:{found.column}" if found.line else found.file
        message = _printable(found.message)
        lines.append(f"{where}: {found.severity}: {message}" + (f"  [{found.code}]" if found.code else ""))
        if found.source_line and found.column:
            start = max(0, found.column - 1 - _MAX_SHOWN_COLUMNS // 2) if found.column > _MAX_SHOWN_COLUMNS else 0
            shown = found.source_line[start : start + _MAX_SHOWN_COLUMNS]
            lines.append(shown)
            lines.append("".join("\t" if c == "\t" else " " for c in shown[: found.column - 1 - start]) + "^")
    return "\n".join(lines)


def _diagnostics(error: Exception, file: str, findings: dict[int, str], positions: Positions) -> list[Diagnostic]:
    """Findings of the tolerant pass, by offset, unless ``text_format`` stopped at an earlier error."""
    if yaml := _YAML.search(positions.text):
        cause = "this is YAML, not protobuf text format; of a KServe or Seldon Core graph, weft convert makes one"
        return [diagnostic(file, positions, positions.at(yaml.start()), cause)]
    if isinstance(error, text_format.ParseError):
        where = (error.GetLine() or 0, error.GetColumn() or 0)
        cause = _plain_cause(_ERROR_PREFIX.sub("", str(error)).rstrip("."))
    else:
        where = (0, 0)
        cause = "nested too deeply" if isinstance(error, RecursionError) else f"not a valid text-format file: {error}"
    if not findings or (0, 0) < where < positions.at(min(findings)):
        return [diagnostic(file, positions, where, cause)]
    return [diagnostic(file, positions, positions.at(at), findings[at]) for at in sorted(findings)]


def _printable(text: str) -> str:
    """Escape unprintable characters: names in a file may contain any character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain_cause(cause: str) -> str:
    for pattern, text in _PLAIN_CAUSES:
        if pattern.fullmatch(cause):
            return pattern.sub(text, cause)
    return cause


def _checked_text(content: str | bytes, file: str) -> str:
    if len(content) > MAX_FILE_BYTES:
        cause = f"the file has {len(content)} bytes, the limit is {MAX_FILE_BYTES}; it should hold text, not data"
        raise PbtxtError([Diagnostic(file, 0, 0, cause)])
    try:
        text = (content.decode() if isinstance(content, bytes) else content).removeprefix("\ufeff")
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


def diagnostic(file: str, positions: Positions, where: tuple[int, int], message: str) -> Diagnostic:
    return Diagnostic(file, *where, message, source_line=positions.source_line(where[0]))
