"""Conditions: operators and methods on tensors build the text of a CEL expression; what CEL lacks raises.

``o.PROBS.max() >= 0.8`` is ``max(outputs.PROBS) >= 0.8``. Names of tensors and steps are filled in when the graph is
written.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.authoring.faults import fault, lacks
from weft.base.signature import TensorSpec
from weft.base.tensors import FLOATS
from weft.base.text.suggestion import suggestion
from weft.language.types.expression import REDUCTIONS, REQUEST_FIELDS

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: How tightly CEL binds; a weaker operand gets brackets.
_TERNARY, _OR, _AND, _RELATION, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)
#: Methods of CEL's own values, by their name in Python.
_METHODS = {
    "contains": "contains",
    "startswith": "startsWith",
    "endswith": "endsWith",
    "matches": "matches",
    "size": "size",
}
#: Macros over lists, whose argument is a function of one element.
_MACROS = {"any": "exists", "all": "all", "one": "exists_one", "filter": "filter", "map": "map"}
_CONVERSIONS = ("int", "double", "string")
_CEL = 'weft.cel("...", values) takes the text of a condition'


class Expression:
    """A condition, or a value in one.

    Arithmetic and comparisons are Python's; ``&``, ``|`` and ``~`` are CEL's ``&&``, ``||`` and ``!``. Methods:
    ``size()``, ``contains(x)``, ``startswith(x)``, ``endswith(x)``, ``matches(pattern)``, ``is_in([...])``, ``int()``,
    ``double()``, ``string()``, and of lists ``any(lambda x: ...)``, ``all``, ``one``, ``filter``, ``map``.
    """

    __array_ufunc__ = None  # so that numbers of numpy leave operators to this class
    __hash__ = object.__hash__

    def __init__(self, parts: Sequence[Any], level: int = _ATOM, *, is_double: bool = False) -> None:
        self.parts: tuple[Any, ...] = tuple(parts)
        self.level = level
        self.is_double = is_double

    def written(self, name: Callable[[Any], str]) -> str:
        """The CEL text; ``name`` says what a tensor or step is called: ``inputs.X``, ``steps.a``."""
        return "".join(part if isinstance(part, str) else name(part) for part in self.parts)

    def __repr__(self) -> str:
        return f"<condition {self.written(_shown)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METHODS:
            return lambda *values: self._call(_METHODS[name], values)
        if name in _MACROS:
            return lambda function: self._macro(_MACROS[name], function)
        if name in _CONVERSIONS:
            return lambda: Expression([f"{name}(", *self.parts, ")"], is_double=name == "double")
        known = (*_METHODS, *_MACROS, *_CONVERSIONS, "is_in", *self._reductions())
        raise lacks(f"conditions have no '{name}', but {', '.join(known)}; {_CEL}", "G011")

    def _reductions(self) -> tuple[str, ...]:
        return ()

    def _call(self, method: str, values: Sequence[Any]) -> "Expression":
        return Expression([*self._within(_ATOM), f".{method}(", *_listed(values), ")"])

    def _macro(self, macro: str, function: Callable[[Any], Any]) -> "Expression":
        element = Expression(["x"], is_double=self.is_double)
        return Expression([*self._within(_ATOM), f".{macro}(x, ", *as_expression(function(element)).parts, ")"])

    def is_in(self, values: Any) -> "Expression":
        """Whether it is one of ``values``: a list, or an expression that is one."""
        return self._with(" in ", values, _RELATION)

    def __getitem__(self, key: Any) -> "Expression":
        keys = key if isinstance(key, tuple) else (key,)
        for one in keys:
            if not isinstance(one, int | str | Expression) or (isinstance(one, int) and one < 0):
                raise fault("G011", f"[{one!r}]: conditions take one element, counted from 0, as X[0]; {_CEL}")
        parts = [part for one in keys for part in ("[", *as_expression(one).parts, "]")]
        return Expression([*self._within(_ATOM), *parts], is_double=self.is_double)

    def _within(self, level: int) -> Sequence[Any]:
        return self.parts if self.level >= level else ("(", *self.parts, ")")

    def _with(self, operator: str, other: Any, level: int, *, swapped: bool = False) -> "Expression":
        right = as_expression(other, like=self)
        first, second = (right, self) if swapped else (self, right)
        chains = level not in (_RELATION,)
        parts = [*first._within(level if chains else level + 1), operator, *second._within(level + 1)]
        return Expression(parts, level, is_double=level > _RELATION and (self.is_double or right.is_double))

    def __invert__(self) -> "Expression":
        return Expression(["!", *self._within(_UNARY)], _UNARY)

    def __neg__(self) -> "Expression":
        return Expression(["-", *self._within(_UNARY)], _UNARY, is_double=self.is_double)

    def __eq__(self, other: object) -> Any:
        return self._with(" == ", other, _RELATION)

    def __ne__(self, other: object) -> Any:
        return self._with(" != ", other, _RELATION)

    def __bool__(self) -> bool:
        raise fault(
            "G011",
            "a tensor has no value while the graph is written, so Python cannot branch on it; for a step that runs "
            "sometimes write step.when(condition) or weft.switch((condition, step), otherwise=step); for 'and', 'or', "
            "'not' and a < b < c write '&', '|', '~' and (a < b) & (b < c)",
        )

    def __iter__(self) -> Iterator[Any]:
        raise fault(
            "G011",
            "a tensor has no elements while the graph is written; run a step for each with weft.each(step, over=X)",
        )

    def __len__(self) -> int:
        raise fault("G011", "a tensor has no length while the graph is written; write X.size()")

    def __contains__(self, value: object) -> bool:
        raise fault("G011", "Python's 'in' gives True or False; write X.text().contains(\"a\"), or X[0].is_in([...])")


def _binary(operator: str, level: int, *, swapped: bool = False) -> Callable[[Expression, Any], Expression]:
    def combine(self: Expression, other: Any) -> Expression:
        return self._with(f" {operator} ", other, level, swapped=swapped)

    return combine


def _lacking(name: str) -> Callable[..., Any]:
    def refuse(self: Expression, *_: Any) -> Any:
        raise fault("G011", f"conditions have no {name}; they have + - * / %, < <= == != >= >, & | ~; {_CEL}")

    return refuse


for _name, _operator, _level in (
    ("add", "+", _SUM), ("sub", "-", _SUM), ("mul", "*", _PRODUCT), ("truediv", "/", _PRODUCT), ("mod", "%", _PRODUCT),
    ("and", "&&", _AND), ("or", "||", _OR), ("lt", "<", _RELATION), ("le", "<=", _RELATION), ("gt", ">", _RELATION),
    ("ge", ">=", _RELATION),
):  # fmt: skip
    setattr(Expression, f"__{_name}__", _binary(_operator, _level))
    if _level is not _RELATION:
        setattr(Expression, f"__r{_name}__", _binary(_operator, _level, swapped=True))
for _name in ("pow", "floordiv", "matmul", "xor", "lshift", "rshift", "abs", "round", "int", "float", "index"):
    setattr(Expression, f"__{_name}__", _lacking(_name))


class TensorExpression(Expression):
    """A tensor in a condition: ``max()``, ``min()``, ``mean()``, ``argmax()``, ``size()``, ``text()``, ``X[0]``.

    Reductions take all elements; ``text()`` is the first string, ``size()`` the first dimension.
    """

    output = ""

    def __init__(self, spec: TensorSpec | None = None) -> None:
        self.spec = spec
        super().__init__([self], is_double=spec is not None and spec.datatype in FLOATS)

    def __getattr__(self, name: str) -> Any:
        if name in REDUCTIONS:
            is_double = name == "mean" or (name != "argmax" and self.is_double)
            return lambda: Expression([f"{name}(", self, ")"], is_double=is_double)
        if name == "size":
            return lambda: Expression(["size(", self, ")"])
        return super().__getattr__(name)

    def _reductions(self) -> tuple[str, ...]:
        return tuple(REDUCTIONS)


class RequestFields:
    """``request.id``, ``request.priority`` and ``request.remaining_ms`` of the request, in conditions."""

    def __getattr__(self, name: str) -> Expression:
        if name not in REQUEST_FIELDS:
            raise lacks(f"unknown field '{name}' of request{suggestion(name, REQUEST_FIELDS)}", "G011")
        return Expression([f"request.{name}"])


request = RequestFields()


def header(name: str, default: Any = None) -> Expression:
    """A header of the request, whose name is lower-case, or the default.

    Without a default a request that lacks it fails.
    """
    return _entry("headers", name, default)


def parameter(name: str, default: Any = None) -> Expression:
    """A parameter of the request, or the default.

    Without a default a request that lacks it fails.
    """
    return _entry("parameters", name, default)


def _entry(space: str, name: str, default: Any) -> Expression:
    if default is None:
        return _Entry([f"{space}[{_literal(name)}]"])
    return Expression([f"get({space}, {_literal(name)}, ", *as_expression(default).parts, ")"])


class _Entry(Expression):
    """An entry without a default, which ``has`` may ask for."""


def has(what: Any) -> Expression:
    """Whether an optional tensor is there, an earlier step ran and answered, or a request has a header or parameter."""
    if isinstance(what, TensorExpression):
        return Expression(["has(", what, ")"])
    if isinstance(what, _Entry):
        space, _, name = what.parts[0].removesuffix("]").partition("[")
        return Expression([f"{name} in {space}"], _RELATION)
    if isinstance(what, Expression) or not hasattr(what, "soft"):
        raise fault("G011", f"has() takes a tensor, a step, header(name) or parameter(name), got {what!r}")
    return Expression(["has(", what, ")"])


def where(test: Any, then: Any, otherwise: Any) -> Expression:
    """``then`` where the test holds, else ``otherwise``: CEL's ``test ? then : otherwise``."""
    parts = [as_expression(one)._within(_OR) for one in (test, then, otherwise)]
    return Expression([*parts[0], " ? ", *parts[1], " : ", *parts[2]], _TERNARY)


def cel(text: str, *values: Any) -> Expression:
    """A condition as CEL text, which may say what the operators cannot. Each ``{}`` stands for one of ``values``."""
    pieces = text.split("{}") if values else [text]
    if len(pieces) != len(values) + 1 and values:
        raise fault("G011", f"the text has {len(pieces) - 1} '{{}}' for {len(values)} values: {text!r}")
    parts: list[Any] = [pieces[0]]
    for value, piece in zip(values, pieces[1:], strict=False):
        parts += [*as_expression(value)._within(_ATOM), piece]
    return Expression(parts, _ATOM if re.fullmatch(r"[\w.]+", text) else _TERNARY)


def as_expression(value: Any, like: Expression | None = None) -> Expression:
    """A Python value as a CEL literal; an integer beside floating point becomes floating point."""
    if isinstance(value, Expression):
        return value
    if hasattr(value, "item") and not isinstance(value, list | tuple):
        value = value.item()
    if isinstance(value, bool | str):
        return Expression([_literal(value)])
    if isinstance(value, int | float):
        is_double = isinstance(value, float) or (like is not None and like.is_double)
        if not math.isfinite(value):
            raise fault("G011", f"CEL has no number {value}")
        return Expression([repr(float(value)) if is_double else str(value)], is_double=is_double)
    if isinstance(value, list | tuple):
        return Expression(["[", *_listed(value, like), "]"])
    raise fault("G011", f"{value!r} is no value of a condition; it takes text, numbers, True, False, lists and tensors")


def named(space: str, name: str) -> str:
    """``inputs.X``, or ``inputs["a-b"]``."""
    return f"{space}.{name}" if _IDENTIFIER.fullmatch(name) else f"{space}[{_literal(name)}]"


def _shown(part: Any) -> str:
    return named("inputs", part.output) if isinstance(part, TensorExpression) else str(part)


def _literal(value: str | bool) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(values: Sequence[Any], like: Expression | None = None) -> list[Any]:
    parts: list[Any] = []
    for value in values:
        parts += [", "] * bool(parts) + list(as_expression(value, like).parts)
    return parts
