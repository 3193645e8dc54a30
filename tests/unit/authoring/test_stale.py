"""`weft check` tells when the Python of a graph would write another file."""

from pathlib import Path

import pytest

from weft.authoring import stale as module
from weft.authoring.stale import stale

PYTHON = '''\
import weft
from weft import FP32, Tensor

@weft.graph
def mine(X: Tensor[FP32, 1]):
    """Twice."""
    return weft.step(model_name="double", X=X, outputs={"Y": "Y"})
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file that PYTHON writes."""
    file = tmp_path / "graphs/mine/1/graph.pbtxt"
    file.parent.mkdir(parents=True)
    file.write_text(
        '# Twice.\nname: "mine"\nplatform: "graph"\ninput [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
        'node {\n  name: "root"\n  sequence {\n'
        '    step { model_name: "double" output_map { key: "Y" value: "Y" } }\n  }\n}\n'
    )
    return file


@pytest.mark.parametrize(
    ("python", "found"),
    [
        (PYTHON, []),
        (f"{PYTHON}\nif __name__ == '__main__':\n    raise SystemExit(3)\n", []),
        (f"import sys\nprint('hello')\nassert not sys.argv[1:]\n{PYTHON}", []),
        (PYTHON.replace("Twice", "Once"), [("graph.pbtxt", 1, "writes another text, which has here: # Once.; run ")]),
        (PYTHON.replace("graph\n", "graph(version=2)\n"), [("graph.py", 0, "it writes version 2 of 'mine'")]),
        (PYTHON.replace("def mine", "def yours"), [("graph.py", 0, "it makes no graph 'mine'")]),
        ("x = 1\n", [("graph.py", 0, "it makes no graph at its top level")]),
        (f"{PYTHON}\n1 / 0\n", [("graph.py", 9, "ZeroDivisionError: division by zero")]),
        ("def f():\n    return (\n", [("graph.py", 2, "SyntaxError: '(' was never closed")]),
        (PYTHON.replace("X=X", "no_such=X, X=X, after=5"), [("graph.py", 7, "")]),
        ("import os\nos._exit(7)\n", [("graph.py", 0, "it ends the process")]),
        ("raise SystemExit\n", [("graph.py", 1, "SystemExit: ")]),
    ],
    ids=["same", "main", "prints", "other", "version", "name", "none", "raises", "syntax", "fault", "dies", "exits"],
)
def test_python_beside_a_file(file: Path, python: str, found: list[tuple[str, int, str]]) -> None:
    """Nothing if it writes the same; else what differs, or its error with the line."""
    file.with_name("graph.py").write_text(python)
    said = stale([file, file.with_name("nothing.pbtxt")])
    assert [(name, line) for name, line, _ in found] == [(Path(one.file).name, one.line) for one in said]
    assert [one.message for one in said if not any(words in one.message for _, _, words in found)] == []


def test_a_file_for_many_graphs(file: Path, tmp_path: Path) -> None:
    """`graphs.py` at the top of the repository speaks for its graphs; a `graph.py` beside a file goes before it."""
    other = tmp_path / "graphs/other/1/graph.pbtxt"
    other.parent.mkdir(parents=True)
    other.write_text(file.read_text())
    (tmp_path / "graphs.py").write_text(PYTHON.replace("Twice", "Once"))
    assert [str(file)] == [one.file for one in stale([file, other])]
    file.with_name("graph.py").write_text(PYTHON)
    assert [] == stale([file, other])


def test_modules_of_one_name(file: Path, tmp_path: Path) -> None:
    """Each file imports the module that lies beside it."""
    other = tmp_path / "graphs/yours/1/graph.pbtxt"
    other.parent.mkdir(parents=True)
    other.write_text(file.read_text().replace("mine", "yours"))
    for one in (file, other):
        name = one.parts[-3]
        one.with_name("own.py").write_text(f"NAME = {name!r}\n")
        text = PYTHON.replace("weft.graph", "weft.graph(name=own.NAME)").replace("mine", name)
        one.with_name("graph.py").write_text(f"import own\n{text}")
    assert [] == stale([file, other])


def test_python_that_does_not_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped and named; the other files are judged all the same where they ran before it."""
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.5)
    file.with_name("graph.py").write_text("while True: pass\n")
    (found,) = stale([file])
    assert "it takes more than 0.5 s" in found.message
