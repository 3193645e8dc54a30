"""The part of a user's file that is written into ``model.py``."""

import importlib.util
import linecache
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.case_files import Case, cases

import weft.testing
from weft import GraphError
from weft.authoring.model import Model

HERE = Path(__file__).parent
X = np.array([1.5, -2], np.float32)
HEAD = "import weft\nfrom weft import FP32, Tensor\n\n\n@weft.model\n"
BODY = '    return {"Y": X + X}\n'


def imported(path, name="user_file"):
    """The module in a file, as if a script had imported it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cases(HERE / "carried.txt")
def test_a_model_comes_with_what_it_needs(case: Case, tmp_path, monkeypatch):
    """What is written is as the case says; where it is no error, it answers as the function does."""
    text = textwrap.dedent(case.text)
    begin = "" if "__future__" in text else textwrap.dedent(case.header).strip() + "\n"
    path = tmp_path / "user.py"
    path.write_text(begin + text)
    monkeypatch.setitem(sys.modules, "user_file", None)
    try:
        model = [one for one in vars(imported(path)).values() if isinstance(one, Model)][-1]
        assert model.text.startswith(f'"""Model \'{model.name}\', written by Weft from user.py: change it there."""\n')
        found = model.source.text
    except GraphError as error:
        case.check(error.diagnostics[0].message)
        return
    case.check(found.rstrip())
    with weft.testing.model(model) as tested:
        np.testing.assert_array_equal(X * 2, tested(X=X).Y)
    np.testing.assert_array_equal(X * 2, model(X)["Y"])
    assert model.source.future == "from __future__ import annotations\n\n" * ("__future__" in text)


def test_modules_beside_the_file_lie_beside_the_written_one(tmp_path, monkeypatch):
    """A module that is found only beside the user's file is copied, with those it imports; an installed one is not."""
    (tmp_path / "own_helper.py").write_text("import json\nfrom own_table import TWO\n\n\ndef two():\n    return TWO\n")
    (tmp_path / "own_table.py").write_bytes("# coding: latin-1\r\nTWO = len('éé')\r\n".encode("latin-1"))
    path = tmp_path / "user.py"
    path.write_text(
        "import weft\nfrom weft import FP32, Tensor\nimport own_helper, numpy as np\n\n\n@weft.model\n"
        "def double(X: Tensor[FP32, 2]) -> weft.Outputs(Y=Tensor[FP32, 2]):\n"
        "    return {'Y': np.asarray(X * own_helper.two())}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        model = imported(path).double
        written = model.write(tmp_path / "repository")
    finally:
        for name in ("own_helper", "own_table"):
            sys.modules.pop(name, None)
        monkeypatch.undo()
    names = ["1/model.py", "1/own_helper.py", "1/own_table.py", "config.pbtxt"]
    assert names == sorted(str(one.relative_to(tmp_path / "repository" / "double")) for one in written)
    with weft.testing.model(tmp_path / "repository" / "double") as tested:
        assert [3, -4] == tested(X=X).Y.tolist()


def test_a_package_beside_the_file_is_refused(tmp_path, monkeypatch):
    """A package that only the user's folder has is not left out in silence: the error says to install it."""
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("TWO = 2\n")
    path = tmp_path / "user.py"
    path.write_text(
        "import weft\nfrom weft import FP32, Tensor\nfrom own_package import TWO\n\n\n@weft.model\n"
        "def double(X: Tensor[FP32, 2]) -> weft.Outputs(Y=Tensor[FP32, 2]):\n    return {'Y': X * TWO}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GraphError, match=r"'own_package', a package beside the file.*install it"):
        imported(path).double.write(tmp_path / "repository")


def test_a_cell_of_a_notebook(tmp_path):
    """Of a notebook, the statements of its cell come along, and from other cells modules and plain values."""
    cell = (
        "FACTOR = half * 4\n@weft.model()\n"
        "def double(X: weft.Tensor[weft.FP32, 2]) -> weft.Outputs(Y=weft.Tensor[weft.FP32, 2]):\n"
        "    return {'Y': numpy.asarray(X * FACTOR, numpy.float32)}\n"
    )
    linecache.cache["<cell 2>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 2>")
    names: dict[str, Any] = {"__name__": "__main__", "weft": weft, "numpy": np, "half": 0.5}
    exec(compile(cell, "<cell 2>", "exec"), names)
    assert names["double"].source.text.startswith("half = 0.5\nimport numpy\nFACTOR = half * 4\n")
    with weft.testing.model(names["double"]) as tested:
        assert [3, -4] == tested(X=X).Y.tolist()


def test_what_has_no_file_says_so():
    """A function without a text, as one that ``exec`` made, cannot be written; called, it is a function as ever."""
    names: dict[str, Any] = {"weft": weft}
    exec(
        "@weft.model\ndef f(X: weft.Tensor[weft.FP32, 2]) -> weft.Outputs(Y=weft.Tensor[weft.FP32, 2]):\n    return {}",
        names,
    )
    with pytest.raises(GraphError, match="its text is not there; define it in a file, by def or class"):
        names["f"].text  # noqa: B018  # it is read
    assert names["f"](X) == {}


@pytest.mark.parametrize("name", ["self", "config", "inputs", "batch", "ñandú", "class_"])
def test_a_function_may_have_any_name(tmp_path, name):
    """Names that ``model.py`` has for arguments and variables of its own are free."""
    path = tmp_path / "user.py"
    path.write_text(HEAD + f"def {name}(X: Tensor[FP32, 2], /) -> weft.Outputs(Y=Tensor[FP32, 2]):\n" + BODY)
    with weft.testing.model(getattr(imported(path), name)) as tested:
        assert [3, -4] == tested(X=X).Y.tolist()


def test_a_file_that_changes_is_read_again(tmp_path):
    """A file that is imported, written, changed and imported again is written as it is now."""
    path, function = tmp_path / "user.py", "def double(X: Tensor[FP32, 2]) -> weft.Outputs(Y=Tensor[FP32, 2]):\n"
    for above in ("", "# One more line.\n\n"):
        path.write_text(above + HEAD + function + BODY)
        assert imported(path).double.source.text.endswith(BODY)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("@weft.model(name='../m')\ndef f(X: T) -> weft.Outputs(Y=T):\n", "'../m' needs a name that a folder can have"),
        ("@weft.model(name='')\ndef f(X: T) -> weft.Outputs(Y=T):\n", "'' needs a name that a folder can have"),
        ("@weft.model\nclass f:\n  @staticmethod\n  def __call__(X: T) -> weft.Outputs(Y=T):\n  ", "takes a function"),
        ("@weft.model\nclass f:\n  def __call__() -> weft.Outputs(Y=T):\n  ", "needs self"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, text, says):
    """A name that leaves the repository, and a ``__call__`` that has no instance."""
    path = tmp_path / "user.py"
    path.write_text(f"import weft\nT = weft.Tensor[weft.FP32, 2]\n\n{text}{BODY}")
    with pytest.raises(GraphError, match=says):
        imported(path)
