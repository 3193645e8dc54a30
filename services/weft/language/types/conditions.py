"""Conditions as they run: CEL expressions over tensors, parameters, headers and the request.

An evaluation fills only the variables that the expression uses; CEL bounds the work of one evaluation by an iteration
budget. ``compile_condition`` makes conditions.

Source:
    https://github.com/google/cel-spec/blob/master/doc/langdef.md
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor
from weft.language.plan import Binding, Frame
from weft.language.request_scope import RequestScope
from weft.language.types.expression import Expression
from weft.language.types.readings import Unreadable

_NO_VALUE = re.compile(r'No value with name "(\w+)" found in Activation')
_NO_KEY = re.compile(r"Key not found in map : (.*)")
_NO_OVERLOAD = re.compile(r"No matching overloads found : (.*?)(\(.*\))$")
_NOISE = re.compile(r"^[A-Z_]+: | \[[A-Z_]+\]$")

#: Value of each generated variable.
Values = dict[str, object]
#: Puts what it reads of the request into the values; if that fails, why into the second mapping.
Fill = Callable[[Values, dict[str, str], RequestScope], None]


class Purpose(NamedTuple):
    """What a condition is for.

    Attributes:
        name: Its field, for messages.
        allowed: CEL types of its value.
    """

    name: str
    allowed: tuple[str, ...] = ("bool",)


WHEN = Purpose("when")
KEY = Purpose("key", ("string", "int", "bool"))


class Reading(NamedTuple):
    """A variable that is read from a tensor, which messages call ``label``."""

    variable: str
    label: str
    slot: int
    read: Callable[[WireTensor], object]
    read_rows: Callable[[WireTensor, int], Sequence[object]]


class CelCondition:
    """A compiled condition; safe to use for any number of requests on one event loop.

    Attributes:
        source: The text in the file.
        tensors: Bindings of the tensors that it reads, and of the ``steps.NAME.ok``, under that text.
        type_name: CEL type of its value: bool, string, int or dyn.
        is_test: As of ``Condition``.
    """

    def __init__(
        self,
        expression: Expression,
        compiled: Any,
        type_name: str,
        tensors: tuple[Binding, ...],
        *,
        fills: tuple[Fill, ...],
        flags: tuple[tuple[str, int], ...],
        readings: tuple[Reading, ...],
        purpose: Purpose,
        node: str,
        cel_types: Any,
    ) -> None:
        self.source = expression.source
        self.tensors = tensors
        self.type_name = type_name
        self._evaluate = compiled.eval
        self._maps = expression.maps
        self._fills = fills
        self._flags = flags
        self._readings = readings
        self._purpose = purpose
        self.is_test = purpose.allowed == ("bool",)
        self._takes_bool = "bool" in purpose.allowed
        self._node = node
        self._text_type, self._error_type = cel_types.STRING, cel_types.ERROR

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """``when``, ``accept`` and ``while``: True or False.

        ``on``, ``sticky_by`` and ``key``: text, with true, false and integers as ``case`` has them.

        Raises:
            InvalidArgumentError: It cannot be evaluated, or the value is of another type; the message names the node,
                the expression and the cause.
        """
        values, failures = self._filled(frame, request)
        for variable, label, slot, read, _ in self._readings:
            tensor = frame[slot]
            if tensor is None:
                failures[variable] = _absent(label)
                continue
            try:
                values[variable] = read(tensor)
            except InvalidArgumentError as error:
                failures[variable] = f"{label}: {error.message}"
        return self._value(values, failures)

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        """As ``evaluate`` for each row alone; every tensor is decoded once. The message of an error names the row."""
        if num_rows == 0:
            return []
        values, failures = self._filled(frame, request)
        columns: list[tuple[str, str, Sequence[object]]] = []
        for variable, label, slot, _, read_rows in self._readings:
            tensor = frame[slot]
            if tensor is None:
                failures[variable] = _absent(label)
                continue
            try:
                columns.append((variable, label, read_rows(tensor, num_rows)))
            except InvalidArgumentError as error:
                failures[variable] = f"{label}: {error.message}"
        if not columns:
            return [self._value(values, failures)] * num_rows
        results = []
        for row in range(num_rows):
            for variable, label, column in columns:
                value = column[row]
                if isinstance(value, Unreadable):
                    values.pop(variable, None)
                    failures[variable] = f"{label}: {value.reason}"
                else:
                    values[variable] = value
            results.append(self._value(values, failures, row if numbers is None else numbers[row]))
        return results

    def _filled(self, frame: Frame, request: RequestScope) -> tuple[Values, dict[str, str]]:
        """Values of all but the readings, and why others have none."""
        values: Values = {variable: frame[slot] is not None for variable, slot in self._flags}
        failures: dict[str, str] = {}
        for fill in self._fills:
            fill(values, failures, request)
        return values, failures

    def _value(self, values: Values, failures: Mapping[str, str], row: int | None = None) -> bool | str:
        try:
            result = self._evaluate(data=values)
            value = result.value()
        except Exception as error:  # the binding raises RuntimeError, TypeError and what protobuf raises
            raise self._error(str(error), failures, row) from None
        if isinstance(value, bool):
            if self.is_test:
                return value
            if self._takes_bool:
                return "true" if value else "false"
        elif not self.is_test:
            if isinstance(value, int):
                return str(value)
            if isinstance(value, str) and result.type() == self._text_type:
                return value
        if result.type() == self._error_type:
            raise self._error(str(value), failures, row)
        allowed = " or ".join(self._purpose.allowed)
        raise self._error(f"the value must be {allowed}, got {reprlib.repr(value)}", failures, row)

    def _error(self, cause: str, failures: Mapping[str, str], row: int | None) -> InvalidArgumentError:
        cause = _NOISE.sub("", cause.partition("\n")[0])
        missing = _NO_VALUE.search(cause)
        reason = failures.get(missing[1], cause) if missing else self._plain(cause)
        where = f"node '{self._node}'" if row is None else f"node '{self._node}', row {row}"
        return InvalidArgumentError(f"{self._purpose.name} {self.source!r} of {where}: {reason}")

    def _plain(self, cause: str) -> str:
        """What CEL says, with the cure."""
        if no_key := _NO_KEY.search(cause):
            of = "headers" if self._maps == {"headers"} else "parameters"
            return f"there is no {no_key[1]} in {of}; give a default: get({of}, {no_key[1]}, ...)"
        if overload := _NO_OVERLOAD.search(cause):
            return f"{operator_text(overload[1])} does not take {overload[2]}"
        return cause


def operator_text(name: str) -> str:
    """An operator or a function as authors write it, of CEL's name for it: ``'>'`` of ``_>_``."""
    return f"'{name.strip('_@').replace('_', ' ')}'"


def _absent(label: str) -> str:
    return f"{label} is absent; test it with has({label})"
