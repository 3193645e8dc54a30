"""Cuts a function or class out of its file, with the statements at the top level that it needs."""

import __future__

import ast
import builtins
import copy
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from weft.authoring.faults import Place, fault
from weft.language.syntax.file import GraphError

_AUTHORING = __name__.rpartition(".")[0]
_DECORATOR = f"{_AUTHORING}.model"  # the module that defines it
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Source:
    """What a function or class needs to run in a file of its own.

    The statements of its file that bind or change a name that it uses come along, in their order. A name without one
    there, as that of an enclosing function or of another cell of a notebook, must be a module, something that can be
    imported, or a value that can be written: numbers, texts, lists of them and the like.

    Args:
        function: ``made_of`` itself, or the method whose arguments are tensors; their types are left out.

    Attributes:
        text: Imports, statements, and the definition as the last of them.
        future: The import of annotations from ``__future__`` that the user's file has, else "".
        names: The names that it uses and has, but builtins, with what they mean.
        siblings: Modules beside the user's file that are found only because they lie there, by name.

    Raises GraphError: There is no text, or a name cannot be written down; it names the line of the definition.
    """

    def __init__(self, made_of: Any, function: FunctionType, title: str) -> None:
        code = function.__code__
        self._title, self._place = title, Place(code.co_filename, code.co_firstlineno)
        self._globals = function.__globals__
        linecache.checkcache(code.co_filename)  # the file may have changed since it was imported before
        self._lines = linecache.getlines(code.co_filename, self._globals)  # those of a notebook's cell too
        self.siblings: dict[str, Path] = {}
        is_future = code.co_flags & __future__.annotations.compiler_flag
        self.future, self._begin = "from __future__ import annotations\n\n" * bool(is_future), ""
        self._texts: dict[ast.stmt, str] = {}
        self.names: dict[str, Any] = {made_of.__name__: made_of}
        try:
            self._tree = ast.parse("".join(self._lines))
            definition: Any = next(one for one in ast.walk(self._tree) if self._defines(one, made_of.__name__))
        except (SyntaxError, StopIteration):
            raise self._fault("its text is not there; define it in a file, by def or class") from None
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._need(name, cell.cell_contents, [])
        self._take(definition, self._plain(definition, is_model=True), but=code.co_freevars)
        self.text = self._begin
        for one in dict.fromkeys((*self._tree.body, definition)):
            if one in self._texts:
                above = "".join(self._lines[: self._top(one) - 1])
                num_blank = len(above.splitlines()) - len(above.rstrip().splitlines())
                self.text += "\n" * num_blank * bool(self.text) + self._texts[one] + "\n"

    def _defines(self, node: ast.AST, name: str) -> bool:
        is_named = isinstance(node, _DEFINITIONS) and node.name == name
        return is_named and self._place.line in map(_first_line, (node, *node.body))  # type: ignore[attr-defined]

    def _take(self, statement: ast.stmt, text: str, but: tuple[str, ...] = ()) -> None:
        """Add a statement, and what it needs but these names."""
        self._texts[statement] = text
        for node in ast.walk(ast.parse(text)):
            for module in _modules_of(node):
                self._note_sibling(module)
        for name in sorted(_free_names(self.future + text)):
            if name in but:
                continue
            if name in self._globals:
                if not (name.startswith("__") and name.endswith("__")):  # those that every module has
                    self._need(name, self._globals[name], [one for one in self._tree.body if name in _bound(one)])
            elif not hasattr(builtins, name):
                raise self._fault(f"it uses '{name}', which is not defined; define it at the top level of the file")

    def _need(self, name: str, value: Any, statements: list[ast.stmt]) -> None:
        kind = type(value).__module__
        value = value.__wrapped__ if kind == _DECORATOR else value
        if name in self.names:
            if self.names[name] is not value:
                raise self._fault(f"'{name}' is two different things in what it uses; rename one of them")
            return
        self.names[name] = value
        if kind.startswith(_AUTHORING) and kind != _DECORATOR:
            raise self._fault(
                f"it uses '{name}', which belongs to graphs; make the call a step of a graph, or call the model by "
                "pb_utils.InferenceRequest"
            )
        for one in statements:
            if isinstance(one, ast.Import | ast.ImportFrom):
                lines = [line for line in self._imports(one, name) if line not in self._texts.values()]
                self._texts |= {one: "\n".join(filter(None, [self._texts.get(one), *lines]))} if lines else {}
            elif one not in self._texts and _first_line(one) < self._place.line <= (one.end_lineno or 0):
                raise self._fault(f"'{name}' is made in the statement that it is in; define both at the top level")
            elif one not in self._texts:
                self._take(one, self._plain(one))
        if not statements:
            self._write(name, value)

    def _write(self, name: str, value: Any) -> None:
        """Write a name down for which the file has no statement."""
        module, own = getattr(value, "__module__", None) or "", getattr(value, "__name__", "")
        alias = "" if own == name else f" as {name}"
        if isinstance(value, ModuleType):
            self._begin += f"import {own}{alias}\n"
            self._note_sibling(own)
        elif _is_literal(value):
            self._begin += f"{name} = {value!r}\n"
        elif module != self._globals.get("__name__") and getattr(sys.modules.get(module), own, None) is value:
            self._begin += f"from {module} import {own}{alias}\n"
            self._note_sibling(module)
        else:
            raise self._fault(
                f"it uses '{name}', an object of type {type(value).__name__} that is not made at the top level of its "
                "file; make it there, in the function, or in __init__ of a class"
            )

    def _imports(self, statement: ast.Import | ast.ImportFrom, name: str) -> Iterator[str]:
        """The part of a statement that binds the name, with the full name of the module."""
        for alias in statement.names:
            if (alias.asname or alias.name.partition(".")[0]) == name:
                line, module = f"import {ast.unparse(alias)}", alias.name
                if isinstance(statement, ast.ImportFrom):
                    module = "." * statement.level + (statement.module or "")
                    module = resolve_name(module, self._globals.get("__package__"))
                    line = f"from {module} {line}"
                self._note_sibling(module)
                yield line

    def _note_sibling(self, module: str) -> None:
        root, folder = module.partition(".")[0], Path(self._place.file).resolve().parent
        path, package = folder / f"{root}.py", folder / root / "__init__.py"
        if root in self.siblings or not (path.is_file() or package.is_file()):
            return
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder]
        if PathFinder.find_spec(root, elsewhere) is not None:
            return
        if package.is_file():
            raise self._fault(f"it uses '{root}', a package beside the file, which services do not find; install it")
        self.siblings[root] = path
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            for inner in _modules_of(node):
                self._note_sibling(inner)

    def _plain(self, statement: Any, *, is_model: bool = False) -> str:
        """Text of a statement; that of a model without its decorator, those above it, and the types of its tensors."""
        text = textwrap.dedent("".join(self._lines[self._top(statement) - 1 : statement.end_lineno])).rstrip()
        if statement.col_offset and ast.dump(ast.parse(text)) != ast.dump(ast.Module([statement], [])):
            raise self._fault("its text would change, as strings over several lines; define it at the top level")
        node: Any = ast.parse(text).body[0]
        decorators = getattr(node, "decorator_list", [])
        num_dropped = 1 + max((i for i, one in enumerate(decorators) if self._is_own(one)), default=-1)
        if not (is_model or num_dropped):
            return text
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        function: Any = next(one for one in inner if getattr(one, "name", "") in ("__call__", node.name))
        arguments = copy.deepcopy(function.args)
        arguments.args[:0], arguments.posonlyargs = arguments.posonlyargs, []  # inputs are given by name
        for one in ast.walk(arguments):
            if isinstance(one, ast.arg):
                one.annotation = None
        header = f"def {function.name}({ast.unparse(arguments)})".encode()
        lines = text.encode().splitlines(keepends=True)  # columns are in bytes
        first = min([node.lineno, *(one.lineno for one in decorators[num_dropped:])]) - 1
        begin = b"".join(lines[first : function.lineno - 1]) + lines[function.lineno - 1][: function.col_offset]
        last = function.returns.end_lineno - 1
        rest = lines[last][function.returns.end_col_offset :] + b"".join(lines[last + 1 :])
        plain: bytes = begin + header + rest[rest.index(b":") :]
        return plain.decode()

    def _is_own(self, decorator: ast.expr) -> bool:
        root, *names = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator).split(".")
        value = self.names.get(root, self._globals.get(root))
        for name in names:
            value = getattr(value, name, None)
        return getattr(value, "__module__", None) == _DECORATOR

    def _top(self, statement: ast.stmt) -> int:
        """First line of a statement, of its decorators, and of the comments right above it at the top level."""
        line = _first_line(statement)
        while not statement.col_offset and line > 1 and self._lines[line - 2].startswith("#"):
            line -= 1
        return line

    def _fault(self, message: str) -> GraphError:
        return fault("", f"{self._title} cannot be written as model.py: {message}", self._place)


def _first_line(node: Any) -> int:
    first: int = min([getattr(node, "lineno", 0), *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return first


def _bound(statement: ast.stmt, *, or_changed: bool = True) -> set[str]:
    """Names that a statement binds in its module, or changes: ``x = 1``, ``x[0] = 1``, ``x.append(1)``."""
    test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
    if test.startswith("__name__ ==") or test.endswith("TYPE_CHECKING"):  # for the script alone, or never
        return set()
    names: set[str] = set()
    nodes: list[ast.AST] = [statement]
    while nodes:
        node: Any = nodes.pop()
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        changed = node.value.func if is_call and isinstance(node.value.func, ast.Attribute) else node
        if is_call or isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            while or_changed and isinstance(changed, ast.Attribute | ast.Subscript):
                changed = changed.value
            names.update({changed.id} if isinstance(changed, ast.Name) else ())
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            nodes += ast.iter_child_nodes(node)
    return names


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _free_names(text: str) -> set[str]:
    """Names that a text reads and does not bind itself, builtins too."""
    top = symtable.symtable(text, "model.py", "exec")
    names, tables = set[str](), [top]
    while tables:
        table = tables.pop()
        is_free = symtable.Symbol.is_referenced if table is top else symtable.Symbol.is_global
        names.update(one.get_name() for one in table.get_symbols() if is_free(one))
        tables += table.get_children()
    return names.difference(*(_bound(one, or_changed=False) for one in ast.parse(text).body))


def _is_literal(value: Any) -> bool:
    try:
        written = ast.literal_eval(repr(value))
        return type(written) is type(value) and bool(written == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
