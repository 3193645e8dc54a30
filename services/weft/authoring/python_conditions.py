"""Writes a condition as Python, where its operators say exactly the same."""

import ast
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from weft.authoring.expressions import TensorExpression, has, header, named, parameter, request
from weft.base.errors import WeftError
from weft.language.types.expression import MAPS, REDUCTIONS, REQUEST_FIELDS

_WORD = re.compile(
    r"""(?:"(?P<text>[^"\\]*)"|'(?P<other>[^'\\]*)')"""
    r"""|\b(?P<space>inputs|outputs|steps)(?:\.(?P<name>[A-Za-z_]\w*)|\["(?P<key>[^"\\]*)"\])|\w+|&&|\|\||!(?!=)|["'\\]"""
)
#: CEL -> Python; ``and``, ``or``, ``not`` bind as CEL's operators do, and become ``&``, ``|``, ``~`` with brackets.
_WORDS = {
    "&&": "and",
    "||": "or",
    "!": "not",
    "true": "True",
    "false": "False",
    "startsWith": "startswith",
    "endsWith": "endswith",
}
_KNOWN = {*_WORDS, *REDUCTIONS, *MAPS, *REQUEST_FIELDS, "has", "get", "size", "request", "contains", "matches"}


def python_condition(text: str, find: Callable[[str, str], str | None]) -> tuple[str, set[str]]:
    """The condition as Python, or as a literal of its text; and the names of ``weft`` that it uses.

    Args:
        find: Python for a name in ``inputs``, ``outputs`` or ``steps``; None if there is none.
    """
    functions = {"header": header, "parameter": parameter, "request": request, "has": has}
    stubs: dict[str, Any] = {}
    words: dict[str, Any] = {}
    try:
        tree = _Operators().visit(
            ast.parse(_WORD.sub(lambda match: _as_python(match, stubs, words), text), mode="eval")
        )
        if any(isinstance(node, ast.Pow | ast.LShift) for node in ast.walk(tree)):  # nothing that takes long
            raise ValueError(text)
        code = ast.unparse(ast.fix_missing_locations(tree))
        condition = eval(code, {"__builtins__": {}}, functions | stubs)  # noqa: S307  # made of known words alone
        if condition.written(lambda part: named(*part.place)) != text:
            raise ValueError(text)
        words = {key: find(*one) if isinstance(one, tuple) else literal(one) for key, one in words.items()}
        if None in words.values():
            raise ValueError(text)
    except (SyntaxError, ValueError, TypeError, AttributeError, NameError, RecursionError, WeftError):
        return literal(text), set()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & functions.keys()
    return re.sub("|".join(words) or "$^", lambda match: str(words[match[0]]), code), used


def _as_python(match: re.Match[str], stubs: dict[str, Any], words: dict[str, Any]) -> str:
    """A word as Python has it; a placeholder for texts and names. Raises ValueError: neither known nor a number."""
    key, place = f"_held_{len(words)}_", (match["space"], match["name"] or match["key"])
    if place[0]:
        stubs[key], words[key] = SimpleNamespace(soft=None) if place[0] == "steps" else TensorExpression(), place
        stubs[key].place = place
    elif (content := match["text"] if match["text"] is not None else match["other"]) is not None:
        stubs[key], words[key] = _Text(content), content
    elif match[0] in _KNOWN or match[0][0].isdigit():
        return _WORDS.get(match[0], match[0])
    else:
        raise ValueError(match[0])
    return key


def literal(value: str | float) -> str:
    """Python for a value, a string in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class _Text(str):
    """A text that cannot be multiplied or formatted."""

    __slots__ = ()
    __mul__ = __rmul__ = __mod__ = None  # type: ignore[assignment]


class _Operators(ast.NodeTransformer):
    """Boolean operators as those of bits, and functions of CEL as methods."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        made, *rest = node.values
        for one in rest:
            made = ast.BinOp(made, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), one)
        return made

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name, (first, *rest) = node.func.id if isinstance(node.func, ast.Name) else "", node.args
        if name in {*REDUCTIONS, "size"}:
            return ast.Call(ast.Attribute(first, name), rest, [])
        if name == "get" and isinstance(first, ast.Name):
            return ast.Call(ast.Name(first.id.removesuffix("s")), rest, [])
        return node
