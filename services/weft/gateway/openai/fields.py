"""Validated access to the fields of a JSON object; unread fields are reported as unknown."""

from collections.abc import Collection, Mapping
from typing import Any

from weft.base.text.suggestion import suggestion
from weft.gateway.errors import RequestError
from weft.gateway.json_text import json_type


class Fields:
    """A JSON object of a request, at ``path`` in the body. A null field counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: dict[str, None] = {}

    def param(self, name: str) -> str:
        """Path of a field, for messages."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The unvalidated value; None if absent."""
        self._known[name] = None
        return self._values.get(name)

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
        return None if value is None else Fields(value, self.param(name))

    def array(self, name: str, max_items: int) -> list[Any] | None:
        """An array of at most ``max_items``. Raises RequestError."""
        value: list[Any] | None = self.raw(name)
        self._check(name, "an array", is_valid=isinstance(value, list))
        if value is not None and len(value) > max_items:
            raise RequestError(
                f"'{self.param(name)}' has {len(value)} items; at most {max_items} are taken", param=self.param(name)
            )
        return value

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect."""
        self._known.update(dict.fromkeys(names))

    def reject(self, name: str, harmless: Collection[Any] = (), why: str = "") -> None:
        """Reject an unsupported field, unless its value is empty, false or one of ``harmless``.

        ``why`` suggests an alternative. Raises RequestError.
        """
        value = self.raw(name)
        if value in (None, False, "", [], {}) or value in harmless:
            return
        raise RequestError(
            f"'{self.param(name)}' is not supported{': ' if why else ''}{why}",
            param=self.param(name),
            code="unsupported_parameter",
        )

    def finish(self) -> None:
        """Raise RequestError if a field was neither read nor ignored."""
        for name in self._values:
            if name not in self._known:
                param = self.param(name)[:80]
                raise RequestError(
                    f"Unrecognized request argument supplied: '{param}'{suggestion(name[:80], self._known)}",
                    param=param,
                    code="unknown_parameter",
                )

    def _check(self, name: str, allowed: str, *, is_valid: bool) -> None:
        """Raise RequestError for an invalid field that is present."""
        value, param = self._values.get(name), self.param(name)
        if not (value is None or is_valid):
            raise RequestError(f"'{param}' must be {allowed}, got {shown(value)}", param=param)


def shown(value: object) -> str:
    """A value for a message: its type, and the value itself if short."""
    text = f"{value!r}" if isinstance(value, (int, float, str)) else ""
    return f"{json_type(value)}{' ' if text else ''}{text[:60]}{'...' if len(text) > 60 else ''}"


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
