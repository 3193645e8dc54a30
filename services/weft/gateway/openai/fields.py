"""Fields of a JSON object: tables of them, validated access, and a record of those without effect."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from weft.base.text.suggestion import suggestion
from weft.gateway.errors import RequestError
from weft.gateway.json_text import is_encodable, json_type

_MAX_IGNORED = 32
NO_HINTS: Mapping[str, str] = {}
_INDEX = re.compile(r"\[\d+\]")
_NOT_IN_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Field:
    """A row of a table of fields: the field is read by it, and documented by it.

    Attributes:
        type: Type and range, for documentation.
        effect: For documentation; for an unsupported field the cure, which its error has too.
        read: Returns the validated value, None if absent; raises RequestError.
        support: "yes"; "ignored": taken and listed as ignored; "no": refused unless the value asks for nothing.
        harmless: Values of an unsupported field that ask for nothing, besides null, false and what is empty.
        fields: Rows of an object.
        schema: JSON schema of its values, for ``/openapi.json``; empty: one of ``gateway/openapi.json``.
    """

    name: str
    type: str = ""
    effect: str = ""
    default: str = ""
    read: "Callable[[Fields, str], Any] | None" = None
    support: Literal["yes", "ignored", "no"] = "yes"
    harmless: tuple[Any, ...] = ()
    fields: "tuple[Field, ...]" = ()
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Fields:
    """A JSON object of a request, at ``path`` in the body. A null field counts as absent.

    Attributes:
        values: Of its fields, unvalidated.
        ignored: Names of fields without effect, in order, of this object and those in it; indices are left out.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", *, is_strict: bool = False) -> None:
        self.values = values
        self._path = path
        self._known: dict[str, None] = {}
        self._is_strict = is_strict
        self.ignored: dict[str, None] = {}

    def inner(self, values: Mapping[str, Any], path: str) -> "Fields":
        """An object inside of this one; ``path`` is that in the body."""
        fields = Fields(values, path, is_strict=self._is_strict)
        fields.ignored = self.ignored
        return fields

    def read(self, table: Iterable[Field]) -> dict[str, Any]:
        """The values of those fields of a table that are given. Raises RequestError."""
        values: dict[str, Any] = {}
        for row in table:
            if row.support == "no":
                self.reject(row.name, row.harmless, row.effect)
            elif row.support == "ignored":
                self.ignore(row.name)
            elif row.read is not None and (value := row.read(self, row.name)) is not None:
                values[row.name] = value
        return values

    def param(self, name: str) -> str:
        """Path of a field, for messages."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The unvalidated value; None if absent."""
        self._known[name] = None
        return self.values.get(name)

    def string(self, name: str, *, max_chars: int) -> str | None:
        """A string that can be encoded in UTF-8. Raises RequestError."""
        value = self.raw(name)
        return None if value is None else checked_string(value, self.param(name), max_chars=max_chars)

    def boolean(self, name: str) -> bool | None:
        """A boolean. Raises RequestError."""
        value: bool | None = self.raw(name)
        self._check(name, "true or false", is_valid=isinstance(value, bool))
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer from ``low`` to ``high``. Raises RequestError."""
        value: int | None = self.raw(name)
        self._check(name, f"an integer from {low} to {high}", is_valid=type(value) is int and low <= value <= high)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from ``low`` to ``high``. Raises RequestError."""
        value = self.raw(name)
        is_valid = type(value) in (int, float) and low <= value <= high
        self._check(name, f"a number from {low:g} to {high:g}", is_valid=is_valid)
        return None if value is None else float(value)

    def object(self, name: str) -> "Fields | None":
        """An object. Raises RequestError."""
        value = self.raw(name)
        self._check(name, "an object", is_valid=isinstance(value, dict))
        return None if value is None else self.inner(value, self.param(name))

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """The unvalidated values of an object. Raises RequestError."""
        inner = self.object(name)
        return None if inner is None else inner.values

    def array(self, name: str, max_items: int) -> list[Any] | None:
        """An array of at most ``max_items``. Raises RequestError."""
        value: list[Any] | None = self.raw(name)
        self._check(name, "an array", is_valid=isinstance(value, list))
        if value is not None and len(value) > max_items:
            raise RequestError(
                f"'{self.param(name)}' has {len(value)} items; at most {max_items} are taken", param=self.param(name)
            )
        return value

    def objects(
        self,
        name: str,
        max_items: int,
        kinds: Collection[str],
        key: str = "type",
        default: str | None = None,
        hints: Mapping[str, str] = NO_HINTS,
    ) -> "Iterator[tuple[str, Fields]]":
        """The objects of an array, each with its kind, which its field ``key`` says.

        ``hints`` go on the error for a wrong kind; that of "" for all others. Raises RequestError.
        """
        for index, value in enumerate(self.array(name, max_items) or ()):
            param = self.param(f"{name}[{index}]")
            kind = value.get(key, default) if isinstance(value, dict) else None
            if kind is None:
                raise RequestError(f"'{param}' must be an object with '{key}', got {shown(value)}", param=param)
            if not isinstance(kind, str) or kind not in kinds:
                hint = hints.get(kind if isinstance(kind, str) else "", hints.get("", ""))
                allowed = repr(*kinds) if len(kinds) == 1 else f"one of {', '.join(kinds)}"
                raise RequestError(
                    f"'{param}.{key}' must be {allowed}, got {shown(kind)}{hint}", param=f"{param}.{key}"
                )
            fields = self.inner(value, param)
            fields.raw(key)
            yield kind, fields

    def ignore(self, name: str) -> None:
        """Accept a field, and list it as ignored if it is given."""
        if self.raw(name) is not None and len(self.ignored) < _MAX_IGNORED:
            self.ignored[_NOT_IN_NAME.sub("?", _INDEX.sub("[]", self.param(name or "?")[:160]))[:80]] = None

    def reject(self, name: str, harmless: Collection[Any] = (), why: str = "") -> None:
        """Reject an unsupported field; ignore it if its value is empty, false or one of ``harmless``.

        ``why`` suggests an alternative. Raises RequestError.
        """
        value = self.raw(name)
        if value is False or value in (None, "", [], {}, *harmless):
            self.ignore(name)
            return
        raise RequestError(
            f"'{self.param(name)}' is not supported{': ' if why else ''}{why}",
            param=self.param(name),
            code="unsupported_parameter",
        )

    def finish(self) -> None:
        """Ignore the fields that were not read; if strict, raise RequestError for the first."""
        for name in [name for name in self.values if name not in self._known]:
            if self._is_strict:
                param = self.param(name)[:80]
                raise RequestError(
                    f"Unrecognized request argument supplied: '{param}'{suggestion(name[:80], self._known)}",
                    param=param,
                    code="unknown_parameter",
                )
            self.ignore(name)

    def _check(self, name: str, allowed: str, *, is_valid: bool) -> None:
        """Raise RequestError for an invalid field that is present."""
        value, param = self.values.get(name), self.param(name)
        if not (value is None or is_valid):
            raise RequestError(f"'{param}' must be {allowed}, got {shown(value)}", param=param)


def number(name: str, low: float, high: float, effect: str, default: str = "") -> Field:
    """A row for a number from ``low`` to ``high``."""
    read, schema = partial(Fields.number, low=low, high=high), {"type": "number", "minimum": low, "maximum": high}
    return Field(name, f"number, {low:g} to {high:g}", effect, default, read, schema=schema)


def integer(name: str, low: int, high: int, effect: str, default: str = "") -> Field:
    """A row for an integer from ``low`` to ``high``."""
    bound = f"to {high}" if high < _SHOWN_BELOW else "on"
    told = f"integer, {low} {bound}" if low > -_SHOWN_BELOW else "integer"
    read, schema = partial(Fields.integer, low=low, high=high), {"type": "integer", "minimum": low, "maximum": high}
    return Field(name, told, effect, default, read, schema=schema)


def boolean(name: str, effect: str, default: str = "false") -> Field:
    """A row for true or false."""
    return Field(name, "boolean", effect, default, Fields.boolean, schema={"type": "boolean"})


def string(name: str, max_chars: int, effect: str, default: str = "") -> Field:
    """A row for a string of at most ``max_chars``."""
    read, schema = partial(Fields.string, max_chars=max_chars), {"type": "string", "maxLength": max_chars}
    return Field(name, "string", effect, default, read, schema=schema)


def one_of(name: str, values: Collection[str], effect: str, default: str = "") -> Field:
    """A row for one of a few strings."""
    schema = {"type": "string", "enum": [*values]}
    return Field(name, ", ".join(values), effect, default, partial(_one_of, values=values), schema=schema)


def nested(name: str, fields: tuple[Field, ...], effect: str = "") -> Field:
    """A row for an object with rows of its own."""
    return Field(name, "object", effect, "", partial(_nested, table=fields), fields=fields)


def ignored(*names: str) -> tuple[Field, ...]:
    """Rows for fields without effect."""
    return tuple(Field(name, support="ignored") for name in names)


def unsupported(name: str, cure: str = "", harmless: tuple[Any, ...] = ()) -> Field:
    """A row for a field that would change the answer and is not supported; ``harmless`` values ask for nothing."""
    return Field(name, effect=cure, support="no", harmless=harmless)


#: Larger bounds of integers are left out of documentation.
_SHOWN_BELOW = 2**31 - 1


def _one_of(fields: Fields, name: str, values: Collection[str]) -> str | None:
    value: Any = fields.raw(name)
    if value is not None and value not in values:
        param = fields.param(name)
        raise RequestError(f"'{param}' must be one of {', '.join(values)}, got {shown(value)}", param=param)
    return None if value is None else str(value)


def _nested(fields: Fields, name: str, table: tuple[Field, ...]) -> dict[str, Any] | None:
    inner = fields.object(name)
    if inner is None:
        return None
    values = inner.read(table)
    inner.finish()
    return values


def shown(value: object) -> str:
    """A value for a message: its type, and the value itself if short."""
    text = f"{value!r}" if isinstance(value, (int, float, str)) else ""
    return f"{json_type(value)}{' ' if text else ''}{text[:60]}{'...' if len(text) > 60 else ''}"


def check_utf8(value: object, param: str) -> None:
    """Raise RequestError if a string in a JSON value cannot be encoded in UTF-8."""
    if not is_encodable(json.dumps(value, ensure_ascii=False)):
        raise RequestError(f"'{param}' has half of a surrogate pair; send whole characters", param=param)


def checked_string(value: object, param: str, *, max_chars: int) -> str:
    """``value``, if it is a string of at most ``max_chars`` that UTF-8 can encode. Raises RequestError."""
    if not isinstance(value, str):
        raise RequestError(f"'{param}' must be a string, got {shown(value)}", param=param)
    if len(value) > max_chars:
        raise RequestError(f"'{param}' has {len(value)} characters; at most {max_chars} are taken", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"'{param}' has half of a surrogate pair at character {error.start}; send whole characters", param=param
        ) from None
    return value
