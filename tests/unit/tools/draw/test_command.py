"""`weft draw` on files, without a server."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.tools.graphs import repository

from weft.cli.__main__ import main

GRAPH = """name: "g" platform: "graph" max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] } ]
node { name: "root" sequence { step { name: "lid" model_name: "lang_id" } } }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with one model and one graph, `g`."""
    return repository(tmp_path / "repository", GRAPH)


def test_mermaid_is_printed_by_default(folder, capsys):
    """Without -o and --format a flowchart goes to standard output."""
    assert 0 == main(["draw", "g", "--repository", str(folder)])
    assert "flowchart TB" == capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.mmd", "flowchart"), ("a.dot", "digraph"), ("a.SVG", "<svg"), ("a.txt", "g/1 ["), ("a", "flow")],
)
def test_the_suffix_of_the_file_decides(folder, tmp_path, capsys, name, start):
    """-o writes in the format of its suffix, Mermaid where it has none; nothing is printed."""
    assert 0 == main(["draw", "g", "--repository", str(folder), "-o", str(tmp_path / name)])
    assert (tmp_path / name).read_text().startswith(start)
    assert ("", "") == capsys.readouterr()


def test_the_format_comes_before_the_suffix(folder, tmp_path):
    """--format decides, whatever the file is called."""
    assert 0 == main(["draw", "g", "--repository", str(folder), "-o", str(tmp_path / "a.mmd"), "--format", "svg"])
    ElementTree.fromstring((tmp_path / "a.mmd").read_text())


def test_the_repository_of_a_file_is_found(folder, capsys):
    """A file in a repository needs no --repository; its name and version are those of its folders."""
    assert 0 == main(["draw", str(folder / "graphs/g/1/graph.pbtxt"), "--format", "text"])
    assert "g/1 [sequence]  batch of at most 8" == capsys.readouterr().out.splitlines()[0]


def test_the_repository_of_the_working_directory_is_the_default(folder, monkeypatch, capsys):
    """A name is looked up in ./model_repository."""
    monkeypatch.chdir(folder.parent)
    folder.rename("model_repository")
    assert 0 == main(["draw", "g/1", "--format", "text"])
    assert "lid  lang_id" in capsys.readouterr().out


def test_a_suffix_that_is_no_drawing(folder, tmp_path, capsys):
    """Nobody gets text in a file that is called a picture; --format says what is meant."""
    assert 2 == main(["draw", "g", "--repository", str(folder), "-o", str(tmp_path / "g.png")])
    assert "weft draw: no drawing is a '.png' file; use one of .mmd" in capsys.readouterr().err
    assert [] == list(tmp_path.glob("g.png"))
    assert 0 == main(["draw", "g", "--repository", str(folder), "-o", str(tmp_path / "g.md"), "--format", "mermaid"])


def test_an_unknown_graph(folder, capsys):
    """A name that no graph has is answered with the nearest one, and exit status 2."""
    assert 2 == main(["draw", "gg", "--repository", str(folder)])
    assert f"weft draw: 'gg' is no file and no graph of '{folder}'; did you mean 'g'?\n" == capsys.readouterr().err


def test_an_unknown_version(folder, capsys):
    """A version that is not there is answered with those that are."""
    assert 2 == main(["draw", "g/7", "--repository", str(folder)])
    assert "weft draw: graph 'g' has no version '7'; it has 1\n" == capsys.readouterr().err


def test_a_folder_is_no_graph(folder, capsys):
    """A folder is named as such, wherever it lies."""
    path = folder / "graphs"
    assert 2 == main(["draw", str(path), "--repository", str(folder)])
    assert f"weft draw: '{path}' is a folder; give a graph file in it, or the name of a graph\n" == (
        capsys.readouterr().err
    )


def test_a_name_without_a_repository(tmp_path, monkeypatch, capsys):
    """Where there is no repository a name cannot be looked up, and the message says what to give."""
    monkeypatch.chdir(tmp_path)
    assert 2 == main(["draw", "g"])
    assert "weft draw: 'g' is no file; to find a graph by its name, give --repository DIR\n" == capsys.readouterr().err


def test_an_unknown_repository(tmp_path, capsys):
    """A folder that is not there is named."""
    assert 2 == main(["draw", "g", "--repository", str(tmp_path / "none")])
    assert f"weft draw: no such folder: {tmp_path / 'none'}\n" == capsys.readouterr().err


def test_a_file_without_models(folder, tmp_path, monkeypatch, capsys):
    """A graph file outside a repository needs --repository, and the message says so."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "alone.pbtxt"
    file.write_text(GRAPH)
    assert 2 == main(["draw", str(file)])
    text = f"weft draw: the models that '{file}' calls are not known; give --repository DIR or --lock FILE\n"
    assert text == capsys.readouterr().err
    assert 0 == main(["draw", str(file), "--repository", str(folder)])


def test_the_configuration_of_a_model_is_no_graph(folder, capsys):
    """A model's config.pbtxt is refused."""
    config = folder / "model/lang_id/config.pbtxt"
    assert 2 == main(["draw", str(config)])
    assert f"weft draw: '{config}' is the configuration of a model, not a graph\n" == capsys.readouterr().err


def test_errors_of_the_graph_are_shown_as_by_check(folder, capsys):
    """A graph with errors is not drawn; every error goes to standard error with its place, and the status is 1."""
    file = folder / "graphs/g/1/graph.pbtxt"
    file.write_text(GRAPH.replace('model_name: "lang_id"', 'model_name: "lang_ids" whn: "x"'))
    assert 1 == main(["draw", "g", "--repository", str(folder)])
    found = capsys.readouterr()
    assert "" == found.out
    assert f"{file}:4:" in found.err
    assert "unknown field 'whn' in Step; did you mean 'when'?" in found.err


def test_a_broken_model_is_named_too(folder, capsys):
    """If a model is missing because its configuration is wrong, that is told as well."""
    config = folder / "model/lang_id/config.pbtxt"
    config.write_text("backend: ")
    assert 1 == main(["draw", "g", "--repository", str(folder)])
    found = capsys.readouterr().err
    assert "[G002]" in found
    assert str(config) in found


def test_a_model_that_declares_no_tensors(folder, capsys):
    """Where a model's tensors are known only once it is loaded, the message says which model it is."""
    (folder / "model/lang_id/config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 8')
    assert 1 == main(["draw", "g", "--repository", str(folder)])
    assert "inputs or outputs of lang_id are not in the configuration" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(folder, tmp_path, capsys):
    """The reason is given, and the status is 1."""
    target = tmp_path / "none" / "a.svg"
    assert 1 == main(["draw", "g", "--repository", str(folder), "-o", str(target)])
    assert f"weft draw: cannot write '{target}': {os.strerror(2)}\n" == capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_cannot_be_written(folder):
    """The reason is given, in one line."""
    command = [sys.executable, "-m", "weft.cli", "draw", "g", "--repository", str(folder)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (1, f"weft draw: [Errno 28] {os.strerror(28)}\n") == (ended.returncode, ended.stderr)


LOCK = """model { name: "lang_id" version: "2" target: "model" max_batch_size: 8
  input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } output { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] } }
"""


def test_signatures_of_a_lock_file(tmp_path, capsys):
    """With --lock no repository is needed: models are as the file says."""
    file, lock = tmp_path / "g.pbtxt", tmp_path / "signatures.lock"
    file.write_text(GRAPH)
    lock.write_text(LOCK)
    assert 0 == main(["draw", str(file), "--lock", str(lock), "--format", "svg"])
    assert "model lang_id, version 2 as compiled, on 'model'" in capsys.readouterr().out.replace("&apos;", "'")


def test_a_broken_lock_file(folder, tmp_path, capsys):
    """A lock file that cannot be read as one is shown with the place; one that is not there is named."""
    lock = tmp_path / "signatures.lock"
    assert 2 == main(["draw", "g", "--repository", str(folder), "--lock", str(lock)])
    assert f"weft draw: cannot read '{lock}': {os.strerror(2)}\n" == capsys.readouterr().err
    lock.write_text('model { nam: "x" }')
    assert 1 == main(["draw", "g", "--repository", str(folder), "--lock", str(lock)])
    assert f"{lock}:1:9: error: unknown field 'nam'" in capsys.readouterr().err
