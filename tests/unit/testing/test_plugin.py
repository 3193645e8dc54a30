"""The plugin of pytest, in runs of its own; tests/integration/test_model_in_python.py has the mesh."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from _pytest.assertion.rewrite import AssertionRewriter

from weft.testing.golden import compare, golden_text

TEST = """
import numpy as np
import pytest


@pytest.mark.parametrize("case", ["a/b"])
def test_answer(weft_golden, case):
    weft_golden({"Y": np.array([[0.1, NUMBER]], np.float32), "N": np.array([2**60])}, rtol=1e-3)
    weft_golden({"WORD": np.array([b"caf\\xc3\\xa9", b"\\xff"], object), "IS": np.array([True])}, "words")
"""


def run(folder, *arguments):
    """Run pytest there with this plugin, by its name as the tree may not be the one that is installed, and no other."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "weft.testing.plugin", *arguments]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100, check=False)


def test_golden_answers(tmp_path):
    """Answers are kept by --weft-update, compared within their tolerance, and a difference names output and file."""
    path = tmp_path / "test_it.py"
    path.write_text(TEST.replace("NUMBER", "-2"))
    done = run(tmp_path)
    assert (1, True) == (done.returncode, "pytest --weft-update writes what is answered now" in done.stdout)
    assert 0 == run(tmp_path, "--weft-update").returncode
    golden = tmp_path / "golden"
    assert ["test_answer_a_b_.json", "test_answer_a_b_.words.json"] == sorted(one.name for one in golden.iterdir())
    assert (
        '{\n  "Y": {"datatype": "FP32", "shape": [1, 2], "data": [0.1, -2.0]},\n'
        in (golden / "test_answer_a_b_.json").read_text()
    )
    path.write_text(TEST.replace("NUMBER", "-2.001"))
    assert 0 == run(tmp_path).returncode
    path.write_text(TEST.replace("NUMBER", "-2.1"))
    done = run(tmp_path)
    assert 1 == done.returncode
    assert "output 'Y' and" in done.stdout
    assert "Mismatched elements: 1 / 2 (50%)" in done.stdout


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.array([1.0, 2.0]), "output 'Y' is FP64 [2]; it has FP32 [2]"),
        (np.array([[1, 2]], np.float32), "output 'Y' is FP32 [1, 2]; it has FP32 [2]"),
        (np.array([1, np.nan], np.float32), "nan location mismatch"),
    ],
)
def test_another_type_or_shape(value, says):
    """Datatype and shape must be equal, whatever the tolerance is."""
    with pytest.raises(AssertionError) as raised:
        compare({"Y": value}, golden_text({"Y": np.array([1, 2], np.float32)}), "it", rtol=9, atol=9)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "outputs",
    [
        {"X": np.array([np.nan, np.inf, 1 / 3]), "Y": np.array([0.1], np.float16)},
        {"X": np.zeros((0, 3), np.float32), "Y": np.array([], object)},
        {
            "X": np.array([[b"", b"{}", "é".encode()]], object),
            "Y": np.array([2**63], np.uint64),
            "Z": np.array(["ab", "c"]),
        },
        {},
    ],
)
def test_every_value_is_equal_to_itself(outputs):
    """What is written is read again as it was, and no output may be left out or added."""
    compare(outputs, golden_text(outputs), "it", rtol=0, atol=0)
    with pytest.raises(AssertionError, match="it has"):
        compare({**outputs, "W": np.array([1])}, golden_text(outputs), "it", rtol=0, atol=0)


@pytest.mark.parametrize(
    "path",
    ["services/weft/__init__.py", "protos/weft_protos/__init__.py", "services/triton_python_backend_utils.py"],
)
def test_pytest_rewrites_nothing_of_it(path):
    """A wheel with a plugin is rewritten by pytest, which warns where it is imported already; not this one."""
    text = (Path(__file__).parents[3] / path).read_text()
    assert AssertionRewriter.is_rewrite_disabled(ast.get_docstring(ast.parse(text)))


def test_a_run_without_it_stays_as_it_was(tmp_path):
    """A run that uses neither its fixtures nor its option imports no module of Weft but it, nor numpy."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import sys


            def test_it(request):
                loaded = [name for name in sys.modules if name.split(".")[0] in ("weft", "numpy", "google")]
                assert ["weft", "weft.testing", "weft.testing.plugin"] == sorted(loaded)
            """
        )
    )
    done = run(tmp_path, "-W", "error")
    assert 0 == done.returncode, done.stdout


def test_the_model_of_a_fixture_is_closed(tmp_path):
    """``weft_model`` closes its models at the end of the test."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import threading, weft
            from weft import FP32, Tensor

            @weft.model(max_batch_size=4)
            def double(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):
                return {"Y": X * 2}

            def test_answer(weft_model):
                assert [[6]] == weft_model(double)(X=[[3]]).Y.tolist()
                assert "weft-testing" in [one.name for one in threading.enumerate()]

            def test_after():
                assert "weft-testing" not in [one.name for one in threading.enumerate()]
            """
        )
    )
    done = run(tmp_path, "-W", "error")
    assert 0 == done.returncode, done.stdout
