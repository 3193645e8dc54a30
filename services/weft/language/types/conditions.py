"""Compiled conditions: CEL expressions over tensors, parameters, headers and the request.

An evaluation computes only the variables that the expression uses, and decodes only the needed parts of tensors; CEL
bounds its work by an iteration budget. ``compile_condition`` makes conditions.

Source:
    https://github.com/google/cel-spec/blob/master/doc/langdef.md
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import ITEMSIZE_BYTES, Array, WireTensor, decode, num_elements
from weft.language.plan import Binding, Frame
from weft.language.request_scope import RequestScope
from weft.language.types.expression import Expression, Use

#: More elements than this are not turned into a list; reductions such as ``max`` have no limit.
MAX_LIST_ELEMENTS = 1024
#: CEL takes such a string for what stands before the character.
NUL_FAULT = "a string that conditions read has no NUL character, this one has"
_MAX_INTEGER = 2**63 - 1
_LENGTH_BYTES = 4
_REDUCTIONS: Mapping[Use, Callable[..., Array]] = {Use.ARGMAX: np.argmax, Use.MAX: np.max, Use.MIN: np.min}

#: Reads one value from a tensor; raises InvalidArgumentError where it has no such value.
Read = Callable[[WireTensor], object]
#: Reads the value of each row from a tensor and the number of rows, an ``Unreadable`` where a row has no such value.
ReadRows = Callable[[WireTensor, int], Sequence[object]]


class Unreadable(NamedTuple):
    """Stands for the value of a row that cannot be read, with the reason."""

    reason: str


def reading(use: Use, num_dims: int, index: tuple[int, ...] = ()) -> Read:
    """Return a function that reads ``use`` from a one-row tensor; ``MAX``, ``MIN`` and ``MEAN`` read all rows together.

    Args:
        use: ``VALUE`` gives a list, nested as the dims are, or one element; ``SIZE`` the first dim.
        index: Of ``VALUE``: the part that is read; no other element is decoded. At most ``num_dims`` numbers.
    """
    takes_all_rows = use in (Use.MAX, Use.MIN, Use.MEAN)

    def read(tensor: WireTensor) -> object:
        shape = tensor.shape
        if takes_all_rows:
            value = _reduced(use, decode(tensor).reshape(1, -1), tensor)[0]
        elif use is Use.SIZE and len(shape) == num_dims + 1:
            value = _size(tensor, 1)
        elif len(shape) == num_dims + 1 and shape[0] == 1:
            value = _of_row(use, tensor, shape[1:], index)
        elif len(shape) == num_dims:
            value = _of_row(use, tensor, shape, index)
        else:
            raise InvalidArgumentError(
                f"{'text() reads' if use is Use.TEXT else 'elements are read of'} one row, got shape {list(shape)}, "
                "because the whole request takes one branch; send rows one by one, or use max(), min() or mean(), "
                "which take them all"
            )
        if isinstance(value, Unreadable):
            raise InvalidArgumentError(value.reason)
        return value

    return read


def row_reading(use: Use, num_dims: int, index: tuple[int, ...] = ()) -> ReadRows:
    """Return a function that reads ``use`` from each row of a tensor, like ``reading`` for that row alone.

    The tensor is decoded once.
    """

    def read(tensor: WireTensor, num_rows: int) -> Sequence[object]:
        shape = tensor.shape
        if len(shape) != num_dims + 1 or shape[0] != num_rows:
            raise InvalidArgumentError(f"{num_rows} rows are read one by one, got shape {list(shape)}")
        if use is Use.SIZE:
            return [_size(tensor, 1)] * num_rows
        array = decode(tensor)
        if use is Use.VALUE:
            _check_index(index, shape[1:])
            _check_size(num_elements(shape[1 + len(index) :]))
            for one in index:
                array = array[:, one]
            return _listed(array)
        if use is not Use.TEXT:
            return _reduced(use, array.reshape(num_rows, num_elements(shape[1:])), tensor)
        if tensor.datatype != "BYTES" or not array.size:
            raise InvalidArgumentError(f"the {tensor.datatype} tensor of shape {list(shape)} has no first string")
        return [_attempt(_utf8, first) for first in array.reshape(num_rows, -1)[:, 0]]

    return read


def _of_row(use: Use, tensor: WireTensor, dims: tuple[int, ...], index: tuple[int, ...]) -> object:
    """The value of a tensor of one row, with dims ``dims``."""
    if use is Use.SIZE:
        return _size(tensor, 0)
    if use is Use.ARGMAX:
        return _reduced(use, decode(tensor).reshape(1, -1), tensor)[0]
    if use is Use.TEXT and (tensor.datatype != "BYTES" or 0 in dims):
        raise InvalidArgumentError(f"the {tensor.datatype} tensor of shape {list(tensor.shape)} has no first string")
    _check_index(index, dims)
    inner = dims[len(index) :]
    if tensor.datatype != "BYTES":
        _check_size(num_elements(inner))
        return _listed(decode(tensor).reshape(dims)[index][None])[0]
    count = 1 if use is Use.TEXT else num_elements(inner)
    _check_size(count)
    start = sum(one * num_elements(dims[axis + 1 :]) for axis, one in enumerate(index))
    strings = [_utf8(data) for data in _strings(tensor.data, start, count)]
    return strings[0] if use is Use.TEXT else np.array(strings, dtype=object).reshape(inner).tolist()


def _size(tensor: WireTensor, axis: int) -> int:
    """A dimension of a tensor that has as many bytes as its shape says."""
    itemsize, length = ITEMSIZE_BYTES.get(tensor.datatype, 0), len(tensor.data)
    if itemsize and length != itemsize * num_elements(tensor.shape):
        raise InvalidArgumentError(f"{length} bytes are not a {tensor.datatype} tensor of shape {list(tensor.shape)}")
    return tensor.shape[axis]


def _strings(data: bytes, start: int, count: int) -> list[bytes]:
    """``count`` elements of a BYTES tensor after the first ``start``; copies and reads nothing else."""
    elements, at = [], 0
    for i in range(start + count):
        length = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        end = at + _LENGTH_BYTES + length
        if end > len(data):
            raise InvalidArgumentError(f"the tensor ends inside its string {i}")
        if i >= start:
            elements.append(data[at + _LENGTH_BYTES : end])
        at = end
    return elements


def _utf8(data: bytes) -> str:
    try:
        value = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the string is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
    if "\0" in value:
        raise InvalidArgumentError(NUL_FAULT)
    return value


def _check_index(index: tuple[int, ...], dims: tuple[int, ...]) -> None:
    if any(one >= dim for one, dim in zip(index, dims, strict=False)):
        at = "".join(f"[{one}]" for one in index)
        raise InvalidArgumentError(f"there is no element {at} in a row of shape {list(dims)}")


def _check_size(count: int) -> None:
    if count > MAX_LIST_ELEMENTS:
        raise InvalidArgumentError(
            f"{count} elements are too many to be read at once, the limit is {MAX_LIST_ELEMENTS}; read one, as X[0], "
            "or use size(), max(), min(), mean() or argmax()"
        )


def _listed(rows: Array) -> list[object]:
    values: list[object] = rows.tolist()
    if rows.dtype.kind == "O":
        return [_attempt(_decoded, value) for value in values]
    if rows.dtype == np.uint64 and rows.size and int(rows.max()) > _MAX_INTEGER:
        too_large = Unreadable(f"{rows.max()} is beyond the integers of conditions, which end at {_MAX_INTEGER}")
        return [too_large if int(row.max()) > _MAX_INTEGER else value for row, value in zip(rows, values, strict=True)]
    return values


def _reduced(use: Use, flat: Array, tensor: WireTensor) -> list[object]:
    """One number for each row of ``flat``, the decoded ``tensor``: integers unchanged, others as FP64."""
    if not flat.size or flat.dtype.kind not in "iufV":
        raise InvalidArgumentError(f"a reduction takes numbers, got {tensor.datatype} of shape {list(tensor.shape)}")
    values: Array = flat.mean(axis=1, dtype=float) if use is Use.MEAN else _REDUCTIONS[use](flat, axis=1)
    return _listed(values if values.dtype.kind in "iu" else values.astype(float))


def _attempt(function: Callable[[Any], object], value: object) -> object:
    try:
        return function(value)
    except InvalidArgumentError as error:
        return Unreadable(error.message)


def _decoded(value: Any) -> Any:
    return [_decoded(item) for item in value] if isinstance(value, list) else _utf8(value)


_NO_VALUE = re.compile(r'No value with name "(\w+)" found in Activation')
_NO_KEY = re.compile(r"Key not found in map : (.*)")
_NO_OVERLOAD = re.compile(r"No matching overloads found : (.*?)(\(.*\))$")
_NOISE = re.compile(r"^[A-Z_]+: | \[[A-Z_]+\]$")

#: Value of each generated variable.
Values = dict[str, object]
#: Puts what it reads of the request into the values; if that fails, why into the second mapping.
Fill = Callable[[Values, dict[str, str], RequestScope], None]


class Purpose(NamedTuple):
    """The role of a condition: field name, type of its value."""

    name: str
    allowed: tuple[str, ...] = ("bool",)


WHEN = Purpose("when")
KEY = Purpose("key", ("string", "int", "bool"))


class Reading(NamedTuple):
    """A CEL variable read from a tensor, which messages call ``label``."""

    variable: str
    label: str
    slot: int
    read: Callable[[WireTensor], object]
    read_rows: Callable[[WireTensor, int], Sequence[object]]


@dataclass(slots=True, eq=False)
class CelCondition:
    """A compiled condition; safe to use for any number of requests on one event loop.

    Attributes:
        compiled: CEL's own, of ``cel_types``.
        type_name: CEL type of its value: bool, string, int or dyn.
        flags: Variables that say whether a slot has a tensor.
    """

    expression: Expression
    compiled: Any
    cel_types: Any
    type_name: str
    tensors: tuple[Binding, ...]
    fills: tuple[Fill, ...]
    flags: tuple[tuple[str, int], ...]
    readings: tuple[Reading, ...]
    purpose: Purpose
    node: str
    source: str = field(init=False)
    is_test: bool = field(init=False)

    def __post_init__(self) -> None:
        self.source, self.is_test = self.expression.source, self.purpose.allowed == ("bool",)

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """``when``, ``accept`` and ``while``: True or False.

        ``on``, ``sticky_by`` and ``key``: text, with true, false and integers as ``case`` has them.

        Raises:
            InvalidArgumentError: It cannot be evaluated, or the value is of another type; the message names the node,
                the expression and the cause.
        """
        values, failures = self._filled(frame, request)
        for variable, label, slot, read, _ in self.readings:
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
        for variable, label, slot, _, read_rows in self.readings:
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
        """Values of all names except readings, and errors of those without a value."""
        values: Values = {variable: frame[slot] is not None for variable, slot in self.flags}
        failures: dict[str, str] = {}
        for fill in self.fills:
            fill(values, failures, request)
        return values, failures

    def _value(self, values: Values, failures: Mapping[str, str], row: int | None = None) -> bool | str:
        try:
            result = self.compiled.eval(data=values)
            value = result.value()
        except Exception as error:  # the binding raises RuntimeError, TypeError and what protobuf raises
            raise self._error(str(error), failures, row) from None
        if isinstance(value, bool):
            if self.is_test:
                return value
            if "bool" in self.purpose.allowed:
                return "true" if value else "false"
        elif not self.is_test:
            if isinstance(value, int):
                return str(value)
            if isinstance(value, str) and result.type() == self.cel_types.STRING:
                return value
        if result.type() == self.cel_types.ERROR:
            raise self._error(str(value), failures, row)
        allowed = " or ".join(self.purpose.allowed)
        raise self._error(f"the value must be {allowed}, got {reprlib.repr(value)}", failures, row)

    def _error(self, cause: str, failures: Mapping[str, str], row: int | None) -> InvalidArgumentError:
        cause = _NOISE.sub("", cause.partition("\n")[0])
        missing = _NO_VALUE.search(cause)
        reason = failures.get(missing[1], cause) if missing else self._plain(cause)
        where = f"node '{self.node}'" if row is None else f"node '{self.node}', row {row}"
        return InvalidArgumentError(f"{self.purpose.name} {self.source!r} of {where}: {reason}")

    def _plain(self, cause: str) -> str:
        if no_key := _NO_KEY.search(cause):
            of = "headers" if self.expression.maps == {"headers"} else "parameters"
            return f"there is no {no_key[1]} in {of}; give a default: get({of}, {no_key[1]}, ...)"
        if overload := _NO_OVERLOAD.search(cause):
            return f"{operator_text(overload[1])} does not take {overload[2]}"
        return cause


def operator_text(name: str) -> str:
    """An operator or function as authors write it, from CEL's internal name: ``'>'`` for ``_>_``."""
    return f"'{name.strip('_@').replace('_', ' ')}'"


def _absent(label: str) -> str:
    return f"{label} is absent; test it with has({label})"
