"""Writes a condition as Python, where its operators say exactly the same."""

import ast
import json
from collections.abc import Callable
from typing import Any

from weft.authoring.expressions import TensorExpression, has, header, parameter, request
from weft.base.errors import WeftError
from weft.language.types.expression import MAPS, REDUCTIONS
from weft.language.types.proofs import plain, tokens_of

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
_NAMES = {*REDUCTIONS, *MAPS, "has", "get", "size", "request", "id", "priority", "remaining_ms", "contains", "matches"}
_FUNCTIONS = {"header": header, "parameter": parameter, "has": has, "request": request}


def python_condition(text: str, find: Callable[[str, str], str | None]) -> tuple[str, set[str]]:
    """The condition as Python, or as a literal of its text; and the names of ``weft`` that it uses.

    Args:
        find: Python for a name in ``inputs``, ``outputs`` or ``steps``; None if there is none.
    """
    try:
        source, held = _as_python(text)
        tree = _Operators().visit(ast.parse(source, mode="eval"))
        code = ast.unparse(ast.fix_missing_locations(tree))
        stubs: dict[str, Any] = {key: one if isinstance(one, str) else _stub(*one) for key, one in held.items()}
        condition = eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **stubs})  # noqa: S307  # made of the names above
        is_same = condition.written(_Names()) == text
    except (SyntaxError, ValueError, TypeError, AttributeError, NameError, RecursionError, WeftError):
        is_same = False
    found = (
        {}
        if not is_same
        else {
            key: json.dumps(one, ensure_ascii=False) if isinstance(one, str) else find(*one)
            for key, one in held.items()
        }
    )
    if not is_same or None in found.values():
        return json.dumps(text, ensure_ascii=False), set()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & _FUNCTIONS.keys()
    for key, one in sorted(found.items(), reverse=True):
        code = code.replace(key, str(one))
    return code, used


def _as_python(text: str) -> tuple[str, dict[str, Any]]:
    """The text with Python's words, and placeholders for texts and tensors. Raises ValueError: it has others."""
    tokens, held, words = tokens_of(text), dict[str, Any](), list[str]()
    index = 0
    while index < len(tokens):
        token = tokens[index]
        follows = [one.text for one in tokens[index + 1 : index + 4]]
        key = f"_held_{len(held):04}_"
        index += 1
        if token.kind == "string":
            content = plain(token)
            if content is None:
                raise ValueError(token.text)
            held[key] = content
        elif token.text in ("inputs", "outputs", "steps") and follows[:1] == ["."] and len(follows) > 1:
            held[key] = (token.text, follows[1])
            index += 2
        elif token.text in ("inputs", "outputs", "steps") and follows[0::2] == ["[", "]"]:
            held[key] = (token.text, json.loads(follows[1]))
            index += 3
        elif token.kind in ("raw", "name") and token.text not in {*_NAMES, *_WORDS}:
            raise ValueError(token.text)
        words.append(key if key in held else _WORDS.get(token.text, token.text))
    return " ".join(words), held


class _Operators(ast.NodeTransformer):
    """Boolean operators as those of bits, and functions of CEL as methods."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        made, *rest = node.values
        for one in rest:
            made = ast.BinOp(made, operator, one)
        return made

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name, arguments = (node.func.id if isinstance(node.func, ast.Name) else ""), node.args
        if name in {*REDUCTIONS, "size"}:
            return ast.Call(ast.Attribute(arguments[0], name), arguments[1:], [])
        if name == "get" and isinstance(arguments[0], ast.Name):
            return ast.Call(ast.Name(arguments[0].id.removesuffix("s")), arguments[1:], [])
        return node


class _StepStub:
    """Stands for a step that a condition asks for."""

    soft = None

    def __init__(self, name: str) -> None:
        self.name = name


def _stub(space: str, name: str) -> Any:
    if space == "steps":
        return _StepStub(name)
    tensor = TensorExpression()
    tensor.place = (space, name)  # type: ignore[attr-defined]
    return tensor


class _Names:
    def tensor(self, tensor: Any) -> tuple[str, str]:
        place: tuple[str, str] = tensor.place
        return place

    def step_name(self, step: Any) -> str:
        return str(step.name)
