"""Tolerant pass over protobuf text format: field positions, and common mistakes.

It continues after errors, so that all unknown names and invalid values are found at once, and leaves what it does not
understand to ``text_format``.
"""

import re
from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from weft.base.text.suggestion import suggestion

MAX_DEPTH = 64
#: Most findings reported for one file.
_MAX_FINDINGS = 500
#: A token of the text format, or what is skipped.
TOKEN = re.compile(
    r"(?P<skip>\s+|\#[^\n]*)"
    r"|(?P<name>[A-Za-z_][0-9A-Za-z_+-]*)"
    r"|(?P<number>[0-9.+-][0-9A-Za-z_.+-]*)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"?|'(?:[^'\\\n]|\\.)*'?)"  # one without an end matches too: time stays linear
    r"|(?P<symbol>.)"
)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
#: Most characters of a text quoted in a finding.
_MAX_SHOWN = 100
_MAX_DIGITS = 30  # Python limits the digits of an integer
_CLOSING = {"{": "}", "<": ">"}
_BRACKETS = {"(": 1, "[": 1, ")": -1, "]": -1}
#: Characters other than words that an expression may start with.
_BEFORE_A_WORD = ("!", "(", "/")
#: Names in other systems or in the V2 protocol.
_OTHER_NAMES = {
    "service_name": "model_name",
    "serviceName": "model_name",
    "serviceUrl": "model_name",
    "nodeName": "node",
    "condition": "when",
    "steps": "step",
    "MEAN": "AVERAGE",
    "AVG": "AVERAGE",
    "MAJORITY": "VOTE",
    "MODE": "VOTE",
    "RACE": "FIRST",
    "FASTEST": "FIRST",
    "BYTES": "STRING",
    "TYPE_BYTES": "TYPE_STRING",
}
#: Most messages to suggest for a misplaced field that belongs neither around nor inside the current one.
_MAX_FAR = 3
_BOOLEANS = ("true", "false", "True", "False", "t", "f", "0", "1")
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_NUMBERS = (*_LIMITS, FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


class PbtxtToken(NamedTuple):
    """A token; ``kind`` is name, number, string, symbol or end."""

    kind: str
    text: str
    offset: int


class FieldSpan(NamedTuple):
    """Offsets of a field's name and value; ``literals`` are the parts of a string value."""

    name: int
    value: int
    literals: tuple[PbtxtToken, ...] = ()


class StopScanError(Exception):
    """The text is beyond this pass; ``text_format`` reports the reason."""


class Scan:
    """The tolerant pass: positions of fields, findings."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [
            PbtxtToken(match.lastgroup or "", match.group(), match.start())
            for match in TOKEN.finditer(text)
            if match.lastgroup != "skip"
        ]
        self._next = 0
        self.places: dict[str, FieldSpan] = {}
        self.findings: list[tuple[int, str]] = []
        self.duplicate_keys: list[str] = []
        #: By offset: numbers that no value of their enum has, which ``text_format`` takes.
        self.unknown_numbers: dict[int, str] = {}
        self._around: list[Descriptor | None] = []
        self._root: Descriptor | None = None
        braces = [token.text for token in self._tokens if token.text in ("{", "}")]
        self._lacks_closing = braces.count("{") > braces.count("}")
        self._has_gap = False  # a closing bracket is missing somewhere before the end

    def run(self, descriptor: Descriptor) -> None:
        """Fill the public attributes, as far as the text can be parsed."""
        self._root = descriptor
        try:
            self._fields(descriptor, "", "", 0)
        except StopScanError:
            return

    def _peek(self) -> PbtxtToken:
        if self._next == len(self._tokens):
            return PbtxtToken("end", "", -1)
        return self._tokens[self._next]

    def _take(self) -> PbtxtToken:
        token = self._peek()
        self._next += 1
        return token

    def _find(self, offset: int, message: str) -> None:
        if len(self.findings) == _MAX_FINDINGS:
            raise StopScanError
        self.findings.append((offset, message))

    def _fields(
        self, descriptor: Descriptor | None, prefix: str, closing: str, depth: int, opening: tuple[int, str] = (0, "")
    ) -> None:
        if depth > MAX_DEPTH:
            raise StopScanError
        num_seen: Counter[str] = Counter()
        while True:
            token = self._take()
            if token.text == closing:
                return
            if token.text in (",", ";"):
                continue
            if token.kind == "end" and not self._has_gap:
                self._find(opening[0], f"'{opening[1]}' is not closed; a '{closing}' is missing")
            field = descriptor.fields_by_name.get(token.text) if descriptor else None
            if not field:
                self._check_quotes(token)
            if token.kind != "name":
                raise StopScanError
            if descriptor and not field:
                hint = self._home(token.text, descriptor, closing)
                self._find(token.offset, f"unknown field '{token.text}' in {descriptor.name}{hint}")
            after = self._peek()
            if after.text == "=":
                self._find(after.offset, f"write ':' for '=': {token.text}: ...")
            elif field and not field.message_type and after.text != ":" and after.kind != "end":
                self._find(after.offset, f"a ':' is missing after '{token.text}'")
            if after.text in (":", "="):
                self._take()
            self._values(field, token, prefix + token.text, num_seen, depth)

    def _check_quotes(self, token: PbtxtToken) -> None:
        """Stop if a string ends right before ``token``, which is not a field: the quotes do not pair as intended."""
        before = self._tokens[self._next - 2] if self._next > 1 else token
        if before.kind != "string" or before.offset + len(before.text) != token.offset or token.text == ":":
            return
        quote = before.text[-1]
        other = "'" if quote == '"' else '"'
        self._find(
            token.offset,
            f"a text ends right before this: is a {quote} missing before it? a text that has {quote} in it stands "
            f"between {other} and {other}",
        )
        raise StopScanError

    def _home(self, name: str, descriptor: Descriptor, closing: str) -> str:
        """Hint where a field unknown in ``descriptor`` belongs, or what was intended."""
        around = next((one.name for one in reversed(self._around) if one and name in one.fields_by_name), "")
        places = [f"the {around} around it"] * bool(around)
        if around and self._lacks_closing:
            self._has_gap = True
            return f"; it belongs in {places[0]}: a '{closing}' is missing before it"
        places += _messages_with(name, descriptor)
        meant = suggestion(_meant(name, descriptor.fields_by_name), descriptor.fields_by_name)
        if not places and not meant.startswith("; did you mean"):
            far = _messages_with(name, self._root, is_deep=True)
            places = far if len(far) <= _MAX_FAR else []
        return f"; it belongs in {' or '.join(places)}" if places else meant

    def _values(
        self, field: FieldDescriptor | None, name: PbtxtToken, path: str, seen: Counter[str], depth: int
    ) -> None:
        is_list = self._peek().text == "["
        if is_list:
            bracket = self._take()
            if field and not field.is_repeated:
                self._find(bracket.offset, f"'{name.text}' takes one value, not a list; leave the brackets out")
        while not (is_list and self._peek().text == "]"):
            where = path
            if field and field.is_repeated and not is_map(field):
                where = f"{path}[{seen[name.text]}]"
                seen[name.text] += 1
            self._value(field, name, where, depth, is_listed=is_list)
            if field:
                self.places.setdefault(path, self.places.get(where, FieldSpan(name.offset, name.offset)))
            if not is_list:
                return
            if self._peek().text == ",":
                self._take()
        self._take()

    def _value(
        self, field: FieldDescriptor | None, name: PbtxtToken, path: str, depth: int, *, is_listed: bool
    ) -> None:
        token = self._take()
        if token.text in _CLOSING:
            at = token.offset if is_listed else name.offset
            opening = (at, name.text)
            if field and is_map(field):
                self._map_entry(field, path, opening, _CLOSING[token.text], depth)
                return
            if field:
                self.places[path] = FieldSpan(at, at)
            inner = field.message_type if field else None
            self._around.append(field.containing_type if field else None)
            self._fields(inner, path + ".", _CLOSING[token.text], depth + 1, opening)
            self._around.pop()
            return
        literals: list[PbtxtToken] = []
        if token.kind == "string":
            literals.append(token)
            while self._peek().kind == "string":
                literals.append(self._take())
        elif field and field.cpp_type == FieldDescriptor.CPPTYPE_STRING and token.kind != "end":
            self._bare_text(field, name, token)
            return
        elif token.kind not in ("name", "number"):
            raise StopScanError
        if field and (fault := _value_fault(field, token)):
            self._find(token.offset, fault)
        enum = field.enum_type if field else None
        if enum and _INTEGER.fullmatch(token.text) and not _has_number(enum, token.text):
            self.unknown_numbers[token.offset] = f"unknown value {token.text} of {enum.name}"
        if field:
            self.places[path] = FieldSpan(name.offset, token.offset, tuple(literals))

    def _bare_text(self, field: FieldDescriptor, name: PbtxtToken, first: PbtxtToken) -> None:
        """Skip an unquoted text, possibly of several words, up to the next field or closing bracket."""
        if first.kind == "symbol" and first.text not in _BEFORE_A_WORD:
            raise StopScanError
        last, depth, num_choices = first, _BRACKETS.get(first.text, 0), 0
        while (token := self._peek()).kind != "end" and token.text not in ("{", "}", '"', "'"):
            behind = self._tokens[self._next + 1].text if self._next + 1 < len(self._tokens) else ""
            if token.kind == "name" and behind in (":", "{") and not num_choices:
                break  # a field
            if depth == 0 and token.text in (",", ";", "]"):
                break
            num_choices += (token.text == "?") - (token.text == ":")
            depth += _BRACKETS.get(token.text, 0)
            last = self._take()
        text = self._text[first.offset : last.offset + len(last.text)]
        quote = "'" if '"' in text else '"'
        is_plain = len(text) <= _MAX_SHOWN and "\n" not in text and quote not in text
        shown = f"{quote}{text}{quote}" if is_plain else f"{name.text}: '...'"
        self._find(first.offset, f"'{field.name}' is text; put it in quotes: {shown}")

    def _map_entry(self, field: FieldDescriptor, path: str, opening: tuple[int, str], closing: str, depth: int) -> None:
        at = opening[0]
        outer, self.places = self.places, {}
        self._fields(field.message_type, "", closing, depth + 1, opening)
        inner, self.places = self.places, outer
        key_place = inner.get("key", FieldSpan(at, at))
        key = "".join(_plain(literal) for literal in key_place.literals)
        entry = f"{path}[{key}]"
        if entry in outer:
            self.duplicate_keys.append(entry)
        outer[entry] = FieldSpan(at, at)
        outer[entry + ".key"] = key_place
        for name, place in inner.items():
            if name == "value" or name.startswith("value."):
                outer[entry + name.removeprefix("value")] = place


def _has_number(values: EnumDescriptor, text: str) -> bool:
    return len(text) <= _MAX_DIGITS and int(text) in values.values_by_number


def _value_fault(field: FieldDescriptor, token: PbtxtToken) -> str:
    """Error message for a value, if more precise than that of ``text_format``; "" for none."""
    name, text, kind = field.name, token.text, field.cpp_type
    is_string = token.kind == "string"
    if field.message_type:
        return f"'{name}' holds other fields; write {name} {{ ... }}"
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return ""
    if is_string and (kind in _NUMBERS or field.enum_type):
        plain = _plain(token)
        if field.enum_type:
            values = field.enum_type.values_by_name
            hint = f": {plain}" if plain in values else suggestion(_meant(plain, values), values)
            return f"'{name}' is a name, not text; leave the quotes out{hint}"
        hint = f"; leave the quotes out: {plain}" if _NUMBER.fullmatch(plain) else f", got {text}"
        return f"'{name}' is a number, not text{hint}"
    if field.enum_type:
        if token.kind != "name" or text in field.enum_type.values_by_name:
            return ""
        values = field.enum_type.values_by_name
        return f"unknown value '{text}' of {field.enum_type.name}{suggestion(_meant(text, values), values)}"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        hint = f"; leave the quotes out: {_plain(token)}" if is_string and _plain(token) in _BOOLEANS else ""
        return "" if text in _BOOLEANS else f"'{name}' is true or false, got {text}{hint}"
    least, most = _LIMITS.get(kind, (0, 0))
    if not most:
        return ""
    if not _INTEGER.fullmatch(text):
        return "" if text[-1:].isalnum() and text[:1] == "0" else f"'{name}' is a whole number, got {text}"
    is_short = len(text) <= _MAX_DIGITS
    shown = text if is_short else f"{text[:_MAX_DIGITS]}..."
    return "" if is_short and least <= int(text) <= most else f"'{name}' is {shown}; give {least} to {most}"


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a protobuf map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _messages_with(name: str, start: Descriptor | None, *, is_deep: bool = False) -> list[str]:
    """Message fields of ``start`` that have a field ``name``; if deep, also in nested messages."""
    waiting, seen, found = deque([start] if start else []), set[str](), list[str]()
    while waiting:
        one = waiting.popleft()
        for field in one.fields:
            inner = field.message_type
            if inner and not is_map(field) and inner.full_name not in seen:
                seen.add(inner.full_name)
                found += [f"'{field.name} {{ }}'"] * (name in inner.fields_by_name)
                waiting.extend([inner] * is_deep)
    return found


def _meant(name: str, known: Container[str]) -> str:
    """The entry of ``known`` that corresponds to ``name`` in other systems, else ``name``."""
    meant = _OTHER_NAMES.get(name, name)
    return meant if meant in known else name


def _plain(literal: PbtxtToken) -> str:
    try:
        return text_encoding.CUnescape(literal.text[1:-1]).decode()
    except (ValueError, UnicodeError):
        return literal.text[1:-1]
