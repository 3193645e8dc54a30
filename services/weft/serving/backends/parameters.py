"""Typed access to a model's ``parameters``; an unknown key is an error or a warning."""

import math
from collections.abc import Sequence
from fractions import Fraction

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import ModelContext

_log = get_logger("weft.serving.config")

_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})


class ParameterReader:
    """Reads each known parameter once; ``finish`` rejects the rest. Raises InvalidArgumentError."""

    def __init__(self, model: ModelContext) -> None:
        self._model = model
        self._known: list[str] = []

    def text(self, key: str, default: str) -> str:
        """The value as written."""
        self._known.append(key)
        return self._model.parameters.get(key, default)

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of ``choices``."""
        value = self.text(key, default)
        if value not in choices:
            raise self.fault(key, value, f"one of {', '.join(choices)}")
        return value

    def choices(self, key: str, default: str, choices: Sequence[str]) -> tuple[str, ...]:
        """Some of ``choices``, each at most once, separated by commas."""
        value = self.text(key, default)
        names = tuple(name.strip() for name in value.split(","))
        if not set(names) <= set(choices) or len(set(names)) != len(names):
            raise self.fault(key, value, f"some of {', '.join(choices)}, each at most once")
        return names

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``1``, ``false`` or ``0``; case does not matter."""
        value = self.text(key, str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self.fault(key, value, "true or false")
        return value in _TRUE

    def integer(self, key: str, default: int, *, minimum: int, maximum: int = 2**31 - 1) -> int:
        """An integer from ``minimum`` to ``maximum``, both allowed."""
        value = self.text(key, str(default))
        try:
            number = int(value)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise self.fault(key, value, f"a whole number from {minimum} to {maximum}")
        return number

    def number(self, key: str, default: float) -> float:
        """A finite number, or a quotient like ``16/255``."""
        value = self.text(key, repr(default))
        return self._number(key, value, value)

    def numbers(self, key: str, default: Sequence[float], *, size: int | None = None) -> tuple[float, ...]:
        """Finite numbers separated by commas; with ``size``, exactly that many, or one for all."""
        value = self.text(key, ",".join(map(repr, default)))
        numbers = tuple(self._number(key, value, part) for part in value.split(","))
        if size is not None and len(numbers) not in (1, size):
            raise self.fault(key, value, f"1 or {size} numbers")
        return numbers

    def finish(self) -> None:
        """Reject parameters that were not read, suggesting the nearest known key."""
        for key in sorted(set(self._model.parameters) - set(self._known)):
            text = f"unknown parameter '{key}'{suggestion(key, self._known)}"
            raise self._model.error(f"parameters[{key}].key", text)

    def finish_leniently(self) -> None:
        """Log parameters that were not read, each with the nearest known key."""
        for key in sorted(set(self._model.parameters) - set(self._known)):
            name, near = self._model.signature.name, suggestion(key, self._known)
            _log.warning("model '%s': parameter '%s' is not known and has no effect%s", name, key, near)

    def _number(self, key: str, value: str, part: str) -> float:
        try:
            number = float(Fraction(part.strip()))
        except (ValueError, ZeroDivisionError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.fault(key, value, "finite numbers such as 0.5 or 16/255")
        return number

    def fault(self, key: str, value: object, allowed: str) -> InvalidArgumentError:
        """Make the error for a value that the backend rejects; ``allowed`` says what it must be."""
        text = f"parameter '{key}' must be {allowed}, got '{value}'"
        return self._model.error(f"parameters[{key}].string_value", text)
