"""Conditions: CEL expressions over tensors, parameters, headers and the request.

An expression is compiled once with the types of the tensors that it names. An evaluation fills only the variables that
it uses; CEL bounds the work of one evaluation by an iteration budget.

Source:
    https://github.com/google/cel-spec/blob/master/doc/langdef.md
"""

import re
import reprlib
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from cel_expr_python import cel

from weft_common.errors import InvalidArgumentError
from weft_common.pbtxt import suggestion
from weft_router.graph.expression import FUNCTIONS, Expression, Fault, Use, Variable
from weft_router.graph.plan import Binding, Frame, RequestScope
from weft_router.graph.readings import NUL_FAULT, reading
from weft_router.graph.types import FLOATS, INTEGERS, TensorType

_T = cel.Type
_REQUEST_TYPES = {"id": _T.STRING, "remaining_ms": _T.INT, "priority": _T.INT}
_CEL_ERROR = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): (.*)")
_NO_VALUE = re.compile(r'No value with name "(\w+)" found in Activation')
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'")
_NOISE = re.compile(r" \(in container ''\)| expecting \{.*\}| \[[A-Z_]+\]$")
_STATUS = re.compile(r"^[A-Z_]+: ")
_NS_PER_MS = 1_000_000
_NO_DEADLINE_MS = 2**53

Values = dict[str, object]
#: Puts what it reads into the first mapping; if that fails, why into the second.
_Fill = Callable[[Values, dict[str, str], Frame, RequestScope], None]


class Purpose(Enum):
    """What a condition is for, hence the type that its value must have."""

    WHEN = "when"
    ON = "on"
    STICKY_BY = "sticky_by"


_ALLOWED = {
    Purpose.WHEN: ("bool",),
    Purpose.ON: ("string", "int", "bool"),
    Purpose.STICKY_BY: ("string", "int"),
}


class ConditionError(Exception):
    """An expression does not compile; ``faults`` has every reason with its place in the text."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("; ".join(fault.message for fault in faults))


class CelCondition:
    """A compiled condition; safe to use for any number of requests on one event loop.

    Attributes:
        source: The text in the file.
        tensors: Bindings of the tensors that it reads.
        type_name: CEL type of its value: bool, string, int or dyn.
    """

    def __init__(
        self,
        expression: Expression,
        compiled: Any,
        type_name: str,
        tensors: tuple[Binding, ...],
        fills: tuple[_Fill, ...],
        purpose: Purpose,
        node: str,
    ) -> None:
        self.source = expression.source
        self.tensors = tensors
        self.type_name = type_name
        self._evaluate = compiled.eval
        self._fills = fills
        self._purpose = purpose
        self._node = node

    def evaluate(self, frame: Frame, request: RequestScope) -> object:
        """``when``: True or False. ``on`` and ``sticky_by``: text, with true, false and integers as ``case`` has them.

        Raises:
            InvalidArgumentError: It cannot be evaluated, or the value is of another type; the message names the node,
                the expression and the cause.
        """
        values: Values = {}
        failures: dict[str, str] = {}
        for fill in self._fills:
            fill(values, failures, frame, request)
        try:
            result = self._evaluate(data=values)
            value = result.value()
        except Exception as error:  # the binding raises RuntimeError, TypeError and what protobuf raises
            raise self._error(_first_line(str(error)), failures) from None
        purpose = self._purpose
        if isinstance(value, bool):
            if purpose is Purpose.WHEN:
                return value
            if purpose is Purpose.ON:
                return "true" if value else "false"
        elif purpose is not Purpose.WHEN:
            if isinstance(value, int):
                return str(value)
            if isinstance(value, str) and result.type() == _T.STRING:
                return value
        if result.type() == _T.ERROR:
            raise self._error(_first_line(str(value)), failures)
        raise self._error(f"the value must be {' or '.join(_ALLOWED[purpose])}, got {reprlib.repr(value)}", failures)

    def _error(self, cause: str, failures: Mapping[str, str]) -> InvalidArgumentError:
        missing = _NO_VALUE.search(cause)
        reason = failures.get(missing[1], cause) if missing else _STATUS.sub("", cause)
        return InvalidArgumentError(f"{self._purpose.value} {self.source!r} of node '{self._node}': {reason}")


def compile_condition(
    expression: Expression,
    purpose: Purpose,
    *,
    types: Mapping[str, TensorType],
    slots: Mapping[str, int],
    node: str,
) -> CelCondition:
    """The condition, ready to be evaluated in frames where tensor ``x`` is in ``slots[x]``.

    Args:
        expression: As ``read_expression`` gives it.
        purpose: Decides which types of value are allowed.
        types: Every tensor that the expression may name.
        slots: Of every tensor that it does name.
        node: Name of the node, for messages.

    Raises:
        ConditionError: Syntax, an unknown name, or types that do not fit.
    """
    faults = [*expression.faults, *_tensor_faults(expression, types)]
    if faults:
        raise ConditionError(faults)
    declared: dict[str, Any] = {f"request.{name}": _REQUEST_TYPES[name] for name in expression.request_fields}
    fills: list[_Fill] = [_request_fill(name) for name in sorted(expression.request_fields)]
    for name in sorted(expression.maps):
        declared[name] = _T.Map(_T.STRING, _T.DYN if name == "parameters" else _T.STRING)
        fills.append(_map_fill(name))
    for variable in expression.variables:
        if variable.flag:
            declared[variable.flag] = _T.BOOL
            declared[variable.name] = _T.DYN if variable.use is Use.PARAMETER else _T.STRING
            fills.append(_entry_fill(variable))
        else:
            known = types[variable.key]
            declared[variable.name] = _cel_type(variable.use, known)
            fills.append(_tensor_fill(variable, slots[variable.key], len(known.dims)))
    try:
        compiled = cel.NewEnv(variables=declared).compile(expression.rewritten)
        type_name = compiled.return_type().name().lower()
    except Exception as error:  # the binding raises RuntimeError and TypeError
        raise ConditionError(_cel_faults(str(error), expression, types)) from None
    if type_name not in (*_ALLOWED[purpose], "dyn"):
        allowed = " or ".join(_ALLOWED[purpose])
        raise ConditionError([Fault(0, f"'{purpose.value}' must be {allowed}, this is {type_name}")])
    tensors = tuple(Binding(name, slots[name]) for name in dict.fromkeys(ref.name for ref in expression.references))
    return CelCondition(expression, compiled, type_name, tensors, tuple(fills), purpose, node)


def _cel_type(use: Use, tensor: TensorType) -> Any:
    fixed = {Use.IS_PRESENT: _T.BOOL, Use.TEXT: _T.STRING, Use.ARGMAX: _T.INT, Use.MEAN: _T.DOUBLE}
    if use in fixed:
        return fixed[use]
    if not tensor.is_known:
        return _T.DYN
    element = {"BOOL": _T.BOOL, "BYTES": _T.STRING}.get(tensor.datatype) or (
        _T.INT if tensor.datatype in INTEGERS else _T.DOUBLE
    )
    if use is Use.VALUE:
        for _ in tensor.dims:
            element = _T.List(element)
    return element


def _tensor_faults(expression: Expression, types: Mapping[str, TensorType]) -> list[Fault]:
    """Tensors that are not there, and reductions of tensors that do not have what they read."""
    faults = [
        Fault(at, f"unknown tensor '{name}'{suggestion(name, types)}")
        for name, at in expression.references
        if name not in types
    ]
    for variable in expression.variables:
        tensor = types.get(variable.key)
        if variable.flag or tensor is None or not tensor.is_known or variable.use in (Use.VALUE, Use.IS_PRESENT):
            continue
        wanted = {"BYTES"} if variable.use is Use.TEXT else INTEGERS | FLOATS
        if tensor.datatype not in wanted:
            what = "a BYTES tensor" if variable.use is Use.TEXT else "a tensor of numbers"
            at = next(ref.at for ref in expression.references if ref.name == variable.key)
            message = f"{variable.use.value}() takes {what}; '{variable.key}' is {tensor}, from {tensor.origin}"
            faults.append(Fault(at, message))
    return faults


def _cel_faults(text: str, expression: Expression, types: Mapping[str, TensorType]) -> list[Fault]:
    """Errors of CEL's compiler, with the character each is at."""
    starts = [0, *(match.end() for match in re.finditer("\n", expression.source))]
    faults = []
    for line, column, message in _CEL_ERROR.findall(text):
        row = int(line) - 1
        at = max(0, starts[row] + int(column) - 1) if 0 <= row < len(starts) else 0
        hint = ""
        if undeclared := _UNDECLARED.search(message):
            name = undeclared[1]
            hint = f"; did you mean 'inputs.{name}'?" if name in types else suggestion(name, FUNCTIONS)
            if expression.source[:at].endswith(name):  # of a call, CEL reports the bracket
                at -= len(name)
        elif "(double, int)" in message or "(int, double)" in message:
            hint = "; write 1.0 for 1 where the other side is not a whole number"
        faults.append(Fault(at, _NOISE.sub("", message) + hint))
    return faults or [Fault(0, _NOISE.sub("", _first_line(text)))]


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _tensor_fill(variable: Variable, slot: int, num_dims: int) -> _Fill:
    name = variable.name
    if variable.use is Use.IS_PRESENT:

        def fill_flag(values: Values, failures: dict[str, str], frame: Frame, request: RequestScope) -> None:
            values[name] = frame[slot] is not None

        return fill_flag
    read = reading(variable.use, num_dims)

    def fill(values: Values, failures: dict[str, str], frame: Frame, request: RequestScope) -> None:
        tensor = frame[slot]
        if tensor is None:
            failures[name] = f"inputs.{variable.key} is absent; test it with has(inputs.{variable.key})"
            return
        try:
            values[name] = read(tensor)
        except InvalidArgumentError as error:
            failures[name] = f"inputs.{variable.key}: {error.message}"

    return fill


def _entry_fill(variable: Variable) -> _Fill:
    is_parameter, key, name, flag = variable.use is Use.PARAMETER, variable.key, variable.name, variable.flag

    def fill(values: Values, failures: dict[str, str], frame: Frame, request: RequestScope) -> None:
        value = (request.parameters if is_parameter else request.headers).get(key)
        values[flag] = value is not None
        if isinstance(value, str) and "\0" in value:
            failures[name] = f"{'parameter' if is_parameter else 'header'} '{key}': {NUL_FAULT}"
        elif value is not None:
            values[name] = value

    return fill


def _map_fill(name: str) -> _Fill:
    def fill(values: Values, failures: dict[str, str], frame: Frame, request: RequestScope) -> None:
        entries = dict(request.parameters if name == "parameters" else request.headers)
        for key, value in entries.items():
            if "\0" in key or (isinstance(value, str) and "\0" in value):
                failures[name] = f"{name.removesuffix('s')} {key!r}: {NUL_FAULT}"
                return
        values[name] = entries

    return fill


def _request_fill(name: str) -> _Fill:
    def fill(values: Values, failures: dict[str, str], frame: Frame, request: RequestScope) -> None:
        if name == "id":
            values["request.id"] = request.request_id
        elif name == "priority":
            values["request.priority"] = request.priority
        elif request.deadline_ns is None:
            values["request.remaining_ms"] = _NO_DEADLINE_MS
        else:
            values["request.remaining_ms"] = max(0, request.deadline_ns - time.monotonic_ns()) // _NS_PER_MS

    return fill
