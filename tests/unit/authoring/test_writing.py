"""What `weft.write` puts where, what it leaves alone, and when it writes nothing; what `weft.read` reads."""

import os
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
from tests.unit.authoring.conftest import ROOT

import weft
from weft import FP32, Tensor
from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import PbtxtError
from weft.cli.__main__ import main
from weft.language import GraphError

TEXT = 'name: "g"\nplatform: "graph"\ninput [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
BODY = 'node {\n  name: "root"\n  sequence {\n    step { model_name: "%s" }\n  }\n}\n'


class Model:
    """As what `@weft.model` makes."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def write(self, to: Path) -> list[Path]:
        """Write a configuration, and perhaps fail behind it."""
        file = to / "m" / "config.pbtxt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('name: "m"\n')
        if self.fails:
            raise OSError("disk full")
        return [file]


def _digits(name: str) -> weft.Graph:
    """The sample with another name."""
    graph = weft.read(ROOT / "model_repository/graphs/digits/1/graph.pbtxt")
    graph.message.name = name
    return graph


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_graphs_and_models_have_their_places(tmp_path: Path) -> None:
    """A graph in its version's folder, an ensemble beside it, a model where it says; nothing else is left."""
    graphs = [
        ROOT / "model_repository/graphs/digits/1/graph.pbtxt",
        ROOT / "model_repository/graphs/identity3/config.pbtxt",
    ]
    found = weft.write(*map(weft.read, graphs), Model(), to=tmp_path / "new/repository")
    names = ["graphs/digits/1/graph.pbtxt", "graphs/identity3/config.pbtxt", "model/m/config.pbtxt"]
    assert (
        names
        == _files(tmp_path / "new/repository")
        == sorted(str(one.relative_to(tmp_path / "new/repository")) for one in found)
    )
    assert graphs[0].read_text() == (tmp_path / "new/repository" / names[0]).read_text()
    assert ["new"] == os.listdir(tmp_path)


def test_what_does_not_change_is_not_touched(tmp_path: Path) -> None:
    """A server that watches files sees only those that are new."""
    digits = weft.read(ROOT / "model_repository/graphs/digits/1/graph.pbtxt")
    (file,) = weft.write(digits, to=tmp_path)
    before = file.stat()
    assert [] == weft.write(digits, to=tmp_path)
    assert (before.st_ino, before.st_mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)
    digits.message.policy.timeout_ms = 7
    assert [file] == weft.write(digits, to=tmp_path)
    assert "timeout_ms: 7" in file.read_text()


@pytest.mark.parametrize(
    ("things", "kind"),
    [
        ((lambda: weft.read(TEXT + BODY % "nothing"),), GraphError),
        ((Model, lambda: Model(fails=True)), OSError),
        ((Model, lambda: "a text"), GraphError),
        ((Model, lambda: weft.read('name: "g"\n' + 'node { name: "root" }\n')), GraphError),
        ((Model, Model), GraphError),
        ((lambda: Model,), GraphError),
        ((Model, list), GraphError),
        ((lambda: _digits("../digits"),), GraphError),
    ],
    ids=[
        *("a graph with an error", "a model that cannot be written", "neither", "a node without a kind"),
        *("two of one name", "a class", "a list", "a folder outside"),
    ],
)
def test_one_error_and_nothing_is_written(tmp_path: Path, things: Any, kind: type[Exception]) -> None:
    """Nor a file of what would have been right."""
    (tmp_path / "model").mkdir()
    with pytest.raises(kind):
        weft.write(*(make() for make in things), to=tmp_path)
    assert (["model"], []) == (os.listdir(tmp_path), _files(tmp_path))


def test_read_takes_a_path_or_a_text(tmp_path: Path) -> None:
    """Name and version are those of the folders, the comment at the head is the docstring."""
    file = tmp_path / "graphs/mine/3/graph.pbtxt"
    file.parent.mkdir(parents=True)
    file.write_text("# One.\n#\n#   Two.\n" + BODY % "m")
    for graph in (weft.read(file), weft.read(str(file))):
        assert ("mine", 3, "One.\n\n  Two.") == (graph.name, graph.version, cleandoc(graph.__doc__ or ""))
        assert graph.text.startswith('# One.\n#\n#   Two.\nname: "mine"\n')
    assert ("g", 1) == ((graph := weft.read(TEXT + BODY % "m")).name, graph.version)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("", OSError, "Is a directory"),
        ("nowhere.pbtxt", OSError, "No such file"),
        (ROOT / "model_repository/model/simple/config.pbtxt", InvalidArgumentError, "configuration of a model"),
        ("name: {\n", PbtxtError, "graph.pbtxt:"),
    ],
)
def test_what_is_no_graph_is_refused(source: Any, kind: type[Exception], words: str) -> None:
    """With the file and the reason."""
    with pytest.raises(kind, match=words):
        weft.read(source)


def test_what_a_graph_calls_is_written_with_it(tmp_path: Path) -> None:
    """The models and graphs in Python that its function has called, each once, though they are given as well."""

    @weft.model(name="halve")
    def halve(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return {"Y": X / 2}

    @weft.graph(name="inner")
    def inner(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return halve(X)

    @weft.graph(name="outer")
    def outer(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return inner(X)

    weft.write(outer, halve, to=tmp_path)
    names = [
        "graphs/inner/1/graph.pbtxt",
        "graphs/outer/1/graph.pbtxt",
        "model/halve/1/model.py",
        "model/halve/config.pbtxt",
    ]
    assert names == _files(tmp_path)
    assert 0 == main(["check", str(tmp_path)])
