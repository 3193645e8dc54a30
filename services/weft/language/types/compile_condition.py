"""Compiles an expression to a condition, or reports all its errors.

It is compiled once, with the types of the tensors that it names.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.base.tensors import FLOATS, INTEGERS
from weft.base.text.pbtxt import suggestion
from weft.language.plan import Binding
from weft.language.request_scope import RequestScope
from weft.language.types.conditions import (
    NUL_FAULT,
    CelCondition,
    Fill,
    Purpose,
    Reading,
    Values,
    operator_text,
    reading,
    row_reading,
)
from weft.language.types.expression import FUNCTIONS, MAPS, Expression, Fault, Use, Variable
from weft.language.types.signatures import TensorType

#: Name of the CEL type.
_REQUEST_TYPES = {"id": "STRING", "remaining_ms": "INT", "priority": "INT"}
_HEADER = re.compile(r"[a-z]\w*(-[a-z0-9]\w*)+")
_OF_A_TENSOR = "; a tensor is a list of its elements: take one, X[0], or use text(X), max(X), min(X) or mean(X)"
_CEL_ERROR = re.compile(r"ERROR: <input>:(-?\d+):(-?\d+): (.*)")
_UNDECLARED = re.compile(r"undeclared reference to '([^']*)'")
_NO_OVERLOAD = re.compile(r"found no matching overload for '(.*)' applied to '(\(.*\))'")
_UNEXPECTED = re.compile(r"Syntax error: (?:extraneous|mismatched|no viable alternative at) input")
_WORD = re.compile(r"\w+|\S")
_MISSING = re.compile(r"Syntax error: missing '(.*)' at ")
_BAD_TEXT = re.compile(r"Syntax error: token recognition error at: '[\"'].*?(\\.)?$")
_NOISE = re.compile(r"^[A-Z_]+: | \(in container ''\)| expecting \{.*\}| \[[A-Z_]+\]$")
_NS_PER_MS = 1_000_000
_NO_DEADLINE_MS = 2**53
#: Datatypes that a function reads.
_TAKES = {
    Use.TEXT: ({"BYTES"}, "a BYTES tensor"),
    Use.SIZE: (INTEGERS | FLOATS | {"BYTES", "BOOL"}, "a tensor with dims"),
    **dict.fromkeys((Use.MAX, Use.MIN, Use.ARGMAX, Use.MEAN), (INTEGERS | FLOATS, "a tensor of numbers")),
}


class VisibleBindings(NamedTuple):
    """Names visible to a condition in one space: ``inputs``, ``outputs`` or ``steps``.

    Attributes:
        slots: Of those that it names.
        hidden: Names that exist but are not visible -> why.
    """

    types: Mapping[str, TensorType]
    slots: Mapping[str, int]
    hidden: Mapping[str, str] = {}


class ConditionError(Exception):
    """An expression does not compile; ``faults`` has every error with its position in the text."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("; ".join(fault.message for fault in faults))


def compile_condition(
    expression: Expression,
    purpose: Purpose,
    visible: Mapping[str, VisibleBindings],
    *,
    node: str,
    seen_by: Mapping[str, str] = {},
) -> CelCondition:
    """Compile a condition, to be evaluated in frames with these slots.

    Args:
        visible: By space; a space that is not here must not be used.
        seen_by: By space, which conditions see it, for messages.

    Raises:
        ConditionError: Syntax, an unknown name, or types that do not fit; or CEL is not installed.
    """
    try:
        from cel_expr_python import cel  # noqa: PLC0415  # 52 MB, which a graph without conditions does without
    except ModuleNotFoundError as error:
        text = f"'{purpose.name}' is a condition, and '{error.name}' is not installed; pip install cel-expr-python"
        raise ConditionError([Fault(0, text)]) from None
    types = cel.Type
    faults = [
        *(_aimed(fault, visible) for fault in expression.faults),
        *_name_faults(expression, purpose, visible, seen_by),
    ]
    if faults:
        raise ConditionError(faults)
    declared: dict[str, Any] = {
        f"request.{name}": getattr(types, _REQUEST_TYPES[name]) for name in expression.request_fields
    }
    fills: list[Fill] = [_request_fill(name) for name in sorted(expression.request_fields)]
    flags: list[tuple[str, int]] = []
    readings: list[Reading] = []
    for name in sorted(expression.maps):
        declared[name] = types.Map(types.STRING, types.DYN if name == "parameters" else types.STRING)
        fills.append(_map_fill(name))
    for variable in expression.variables:
        name, use, space, key, index, _ = variable
        if use is Use.ENTRY:
            declared[variable.flag] = types.BOOL
            declared[name] = types.DYN if space == "parameters" else types.STRING
            fills.append(_entry_fill(variable))
            continue
        known, slot = visible[space].types[key], visible[space].slots[key]
        declared[name] = _cel_type(types, use, known, len(index))
        if use in (Use.IS_PRESENT, Use.IS_OK):
            flags.append((name, slot))
        else:
            how = use, len(known.dims), index
            readings.append(Reading(name, f"{space}.{key}", slot, reading(*how), row_reading(*how)))
    try:
        compiled = cel.NewEnv(variables=declared).compile(expression.rewritten)
        type_name = compiled.return_type().name().lower()
    except Exception as error:  # the binding raises RuntimeError and TypeError
        raise ConditionError(_cel_faults(str(error), expression, visible)) from None
    if type_name not in (*purpose.allowed, "dyn"):
        allowed = " or ".join(purpose.allowed)
        hint = _OF_A_TENSOR if type_name.startswith("list") else ""
        raise ConditionError([Fault(0, f"'{purpose.name}' must be {allowed}, this is {type_name}{hint}")])
    named = dict.fromkeys((ref.space, ref.name) for ref in expression.references)
    bindings = tuple(
        Binding(f"steps.{name}.ok" if space == "steps" else name, visible[space].slots[name]) for space, name in named
    )
    return CelCondition(
        expression, compiled, types, type_name, bindings, tuple(fills), tuple(flags), tuple(readings), purpose, node
    )


def _cel_type(types: Any, use: Use, tensor: TensorType, num_indexes: int) -> Any:
    fixed = {
        Use.IS_PRESENT: types.BOOL,
        Use.IS_OK: types.BOOL,
        Use.TEXT: types.STRING,
        Use.ARGMAX: types.INT,
        Use.MEAN: types.DOUBLE,
        Use.SIZE: types.INT,
    }
    if use in fixed:
        return fixed[use]
    if not tensor.is_known:
        return types.DYN
    element = {"BOOL": types.BOOL, "BYTES": types.STRING}.get(tensor.datatype) or (
        types.INT if tensor.datatype in INTEGERS else types.DOUBLE
    )
    if use is Use.VALUE:
        for _ in tensor.dims[num_indexes:]:
            element = types.List(element)
    return element


def _aimed(fault: Fault, visible: Mapping[str, VisibleBindings]) -> Fault:
    """Suggest ``outputs`` instead of ``inputs`` in the message if the named tensor is there."""
    if "outputs" not in visible or fault.tensor not in visible["outputs"].types:
        return fault
    return Fault(fault.at, fault.message.replace(f"inputs.{fault.tensor}", f"outputs.{fault.tensor}"))


def _name_faults(
    expression: Expression, purpose: Purpose, visible: Mapping[str, VisibleBindings], seen_by: Mapping[str, str]
) -> list[Fault]:
    faults = []
    for space, name, at in expression.references:
        what = "step" if space == "steps" else "tensor"
        if space not in visible:
            faults.append(Fault(at, f"'{purpose.name}' does not see '{space}'; {seen_by.get(space, '')}"))
        elif name in visible[space].hidden:
            faults.append(Fault(at, f"{what} '{name}' {visible[space].hidden[name]}"))
        elif name not in visible[space].types:
            is_output = space == "inputs" and "outputs" in visible and name in visible["outputs"].types
            hint = f"; did you mean 'outputs.{name}'?" if is_output else suggestion(name, visible[space].types)
            faults.append(Fault(at, f"unknown {what} '{name}'{hint}"))
    places = {(space, name): at for space, name, at in reversed(expression.references)}
    for variable in expression.variables:
        bindings = visible.get(variable.space)
        tensor = bindings.types.get(variable.key) if bindings else None
        takes = _TAKES.get(variable.use)
        if tensor is None or not tensor.is_known or takes is None:
            continue
        if tensor.datatype not in takes[0] or (variable.use is Use.SIZE and not tensor.dims):
            message = f"{variable.use.value}() takes {takes[1]}; '{variable.key}' is {tensor}, from {tensor.origin}"
            faults.append(Fault(places[variable.space, variable.key], message))
    for space, name, index, at in expression.elements:
        bindings = visible.get(space)
        tensor = bindings.types.get(name) if bindings else None
        if tensor is None or not tensor.is_known:
            continue
        of_tensor = f"'{name}' is {tensor}, from {tensor.origin}"
        if len(index) > len(tensor.dims):
            faults.append(Fault(at, f"{len(index)} indexes are too many: {of_tensor}; give {len(tensor.dims)} or less"))
        elif any(0 <= dim <= one for one, dim in zip(index, tensor.dims, strict=False)):
            batch = ", and the batch dimension is not counted" * tensor.is_batched
            faults.append(Fault(at, f"there is no such element: {of_tensor}; elements are counted from 0{batch}"))
    return faults


def _cel_faults(text: str, expression: Expression, visible: Mapping[str, VisibleBindings]) -> list[Fault]:
    if _HEADER.fullmatch(expression.source):
        cure = f'get(headers, "{expression.source}", "")'
        return [Fault(0, f"this is a subtraction of names that are not known; to read a header, write {cure}")]
    starts = [0, *(match.end() for match in re.finditer("\n", expression.source))]
    faults = []
    for line, column, message in _CEL_ERROR.findall(text):
        row = int(line) - 1
        at = max(0, starts[row] + int(column) - 1) if 0 <= row < len(starts) else 0
        faults.append(_cel_fault(_NOISE.sub("", message), at, expression, visible))
        if message.startswith("Syntax error"):  # what follows from it would be reported as well
            break
    return faults or [Fault(0, _NOISE.sub("", text.partition("\n")[0]))]


def _cel_fault(message: str, at: int, expression: Expression, visible: Mapping[str, VisibleBindings]) -> Fault:
    """An error of CEL's compiler in the author's terms, at CEL's position ``at``."""
    source = expression.source
    if undeclared := _UNDECLARED.search(message):
        name = undeclared[1]
        head = name.partition(".")[0]
        space = next((space for space, bindings in visible.items() if space != "steps" and head in bindings.types), "")
        known = [*visible, *MAPS, "request", *FUNCTIONS]
        hint = f"; did you mean '{space}.{head}'?" if space else suggestion(head, known)
        is_behind = source[:at].endswith(head)  # of a call, CEL reports the bracket; of a.b, the dot
        return Fault(at - len(head) if is_behind else at, message + hint)
    if overload := _NO_OVERLOAD.search(message):
        types = overload[2]
        hint = ""
        if types in ("(double, int)", "(int, double)"):
            hint = "; write 1.0 for 1 where the other side is not a whole number"
        elif "list(" in types:
            hint = _OF_A_TENSOR
        return Fault(at, f"{operator_text(overload[1])} does not take {types}{hint}")
    if _UNEXPECTED.match(message):
        found = _WORD.match(source, at)
        if found is None:
            return Fault(at, "the expression ends too early; something is missing here")
        hint = "; tests are joined with '&&' or '||'" if found[0].isalnum() or found[0] in "\"'" else ""
        return Fault(at, f"'{found[0]}' is not expected here{hint}")
    if missing := _MISSING.match(message):
        return Fault(at, f"a '{missing[1]}' is missing here")
    if bad_text := _BAD_TEXT.match(message.removesuffix("'")):
        escape = f"'{bad_text[1]}' is not an escape; write a pattern as r\"...\"" if bad_text[1] else ""
        return Fault(at, escape or "the closing quote of this text is missing")
    return Fault(at, message)


def _entry_fill(variable: Variable) -> Fill:
    is_parameter, key, name, flag = variable.space == "parameters", variable.key, variable.name, variable.flag

    def fill(values: Values, failures: dict[str, str], request: RequestScope) -> None:
        value = (request.parameters if is_parameter else request.headers).get(key)
        values[flag] = value is not None
        if isinstance(value, str) and "\0" in value:
            failures[name] = f"{'parameter' if is_parameter else 'header'} '{key}': {NUL_FAULT}"
        elif value is not None:
            values[name] = value

    return fill


def _map_fill(name: str) -> Fill:
    def fill(values: Values, failures: dict[str, str], request: RequestScope) -> None:
        entries = dict(request.parameters if name == "parameters" else request.headers)
        for key, value in entries.items():
            if "\0" in key or (isinstance(value, str) and "\0" in value):
                failures[name] = f"{name.removesuffix('s')} {key!r}: {NUL_FAULT}"
                return
        values[name] = entries

    return fill


def _request_fill(name: str) -> Fill:
    def fill(values: Values, failures: dict[str, str], request: RequestScope) -> None:
        if name == "id":
            values["request.id"] = request.request_id
        elif name == "priority":
            values["request.priority"] = request.priority
        elif request.deadline_ns is None:
            values["request.remaining_ms"] = _NO_DEADLINE_MS
        else:
            values["request.remaining_ms"] = max(0, request.deadline_ns - request.clock_ns()) // _NS_PER_MS

    return fill
