"""The public face: which names ``weft`` has, how they are called, and what importing them costs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.public_names import lines_of, own_names

import weft

ROOT = Path(__file__).parents[3]
SNAPSHOT = Path(__file__).with_name("public_names.txt")
#: Modules of Python itself that `import weft` may add to those of a bare interpreter.
CHEAP = {"importlib", "typing", "collections", "functools", "operator", "types", "re", "enum", "contextlib", "keyword"}


def test_the_public_names_are_those_of_the_snapshot() -> None:
    """Names, parameters, defaults: a change is a decision, and is in the changelog; WEFT_UPDATE_GOLDEN writes it."""
    found = "".join(f"{line}\n" for name, thing in own_names() for line in lines_of(name, thing))
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        SNAPSHOT.write_text(found)
    assert SNAPSHOT.read_text().splitlines() == found.splitlines()


def test_each_name_is_listed_and_found() -> None:
    """`__all__`, `dir` and the table of modules have the same names; what type checkers see is the same too."""
    assert ["__version__", *dict(own_names())] == sorted(weft.__all__, key=["__version__", *dict(own_names())].index)
    assert sorted(weft.__all__) == dir(weft)
    assert len(set(weft.__all__)) == len(weft.__all__)
    with pytest.raises(AttributeError, match="'weft' has no attribute 'nothing'"):
        weft.nothing  # noqa: B018 -- the access is what is tested
    tree = ast.parse((ROOT / "services" / "weft" / "__init__.py").read_text())
    (block,) = (one for one in tree.body if isinstance(one, ast.If))
    imports = [one for one in ast.walk(block) if isinstance(one, ast.ImportFrom)]
    seen = {alias.asname or alias.name: str(one.module) for one in imports for alias in one.names}
    assert {"__version__", *seen} == set(weft.__all__)
    assert {} == {name: module for name, module in seen.items() if module not in (weft._MODULES[name], "typing")}


def test_no_public_name_is_a_subpackage() -> None:
    """A module of that name would take the place of `weft.graph` or `weft.model` once it is imported."""
    modules = {path.stem for path in (ROOT / "services" / "weft").iterdir()}
    assert set() == set(weft.__all__) & modules


def test_importing_weft_costs_nothing() -> None:
    """It imports no module of Weft, no numpy, and of others only what is small; a name imports what it needs."""
    program = "import sys; before = {*sys.modules}; import weft; print(*({*sys.modules} - before))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = {name.partition(".")[0].lstrip("_") for name in answer.stdout.split() if name != "weft"}
    assert added - CHEAP <= {"weakref", "abc", "sre", "copyreg", "reprlib", "itertools", "heapq", "warnings"}
    assert "weft.base" not in answer.stdout


def test_types_are_shipped() -> None:
    """Type checkers of users read the annotations."""
    assert (ROOT / "services" / "weft" / "py.typed").is_file()
