"""`weft check` on files, without a server."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.__main__ import main
from weft.tools.check import find_files

CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
GRAPH = """name: "g"
platform: "graph"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
node { name: "root" sequence { step { name: "s" model_name: "m" } } }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ {
  model_name: "m" model_version: -1
  input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" }
} ] }
"""


def write(path: Path, text: str) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def place_of(path: Path, line: int, text: str) -> str:
    """file:line:column of ``text`` in a line."""
    return f"{path}:{line}:{path.read_text().splitlines()[line - 1].index(text) + 1}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose files have no error: a model, a graph, an ensemble as Triton Inference Server writes it."""
    write(tmp_path / "model/m/config.pbtxt", CONFIG)
    write(tmp_path / "graphs/g/1/graph.pbtxt", GRAPH)
    write(tmp_path / "graphs/e/config.pbtxt", ENSEMBLE)
    return tmp_path


def check(*arguments: object) -> int:
    """Exit status of `weft check`."""
    return main(["check", *map(str, arguments)])


def test_a_good_repository_has_no_errors(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Graphs, ensembles and model configurations below a folder are found and checked; status 0, nothing printed."""
    assert check(repository, "--repository", repository) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "3 files, 0 errors, 0 warnings\n"


def test_every_error_of_every_file_is_shown(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of all files and all places come at once, as file:line:column with the line and a caret; status 1."""
    graph = write(
        repository / "graphs/g/1/graph.pbtxt", GRAPH.replace('model_name: "m"', 'node: "nod"').replace("8", "-8")
    )
    config = write(repository / "model/m/config.pbtxt", CONFIG.replace("TYPE_FP32", "TYPE_FP33"))
    assert check(graph, config) == 1
    captured = capsys.readouterr()
    for place, message in (
        (place_of(graph, 6, '"nod"'), "unknown node 'nod'"),
        (place_of(graph, 3, "-8"), "max_batch_size"),
        (place_of(config, 4, "TYPE_FP33"), "unknown value 'TYPE_FP33'"),
        (place_of(config, 5, "TYPE_FP33"), "unknown value 'TYPE_FP33'"),
    ):
        assert f"{place}: error: {message}" in captured.out
    assert captured.err.startswith("2 files, ")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (GRAPH.replace('"m"', '"mm"'), "G002"),
        (
            GRAPH.replace('output [ { name: "Y" data_type: TYPE_FP32', 'output [ { name: "Y" data_type: TYPE_INT64'),
            "G007",
        ),
        (
            GRAPH.replace('name: "X" data_type: TYPE_FP32 dims: [ 4 ]', 'name: "X" data_type: TYPE_FP32 dims: [ 5 ]'),
            "G008",
        ),
    ],
)
def test_names_and_types_are_checked_against_the_repository(
    repository: Path, capsys: pytest.CaptureFixture[str], wrong: str, code: str
) -> None:
    """An unknown model, a wrong datatype and a wrong shape are found by the repository that the graph is in."""
    graph = write(repository / "graphs/g/1/graph.pbtxt", wrong)
    assert 1 == check(graph)
    assert f"[{code}]" in capsys.readouterr().out


def test_a_graph_elsewhere_is_checked_against_the_repository_given_or_the_one_here(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--repository counts first, then ./model_repository."""
    graph = write(tmp_path_factory.mktemp("elsewhere") / "mine.pbtxt", GRAPH.replace('"m"', '"mm"'))
    assert 1 == check(graph, "--repository", repository)
    monkeypatch.chdir(graph.parent)
    (graph.parent / "model_repository").symlink_to(repository)
    assert 1 == check(graph)


def test_nobody_is_told_that_unknown_models_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no repository is found a warning says that names and types were not checked, and what to give."""
    monkeypatch.chdir(tmp_path)
    assert 0 == check(write(tmp_path / "mine.pbtxt", GRAPH))
    captured = capsys.readouterr()
    assert "warning: its models are not known, so names and types were not checked; give --repository" in captured.out
    assert "1 file, 0 errors, 1 warning\n" == captured.err
    assert 1 == check(write(tmp_path / "mine.pbtxt", GRAPH.replace('"s"', '"s/s"')))
    assert "1 file, 1 error, 1 warning\n" == capsys.readouterr().err


def test_graphs_of_two_repositories_are_checked_each_against_its_own(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model of one repository is none of another."""
    other = tmp_path_factory.mktemp("other")
    write(other / "model/n/config.pbtxt", CONFIG)
    graph = write(other / "graphs/g/1/graph.pbtxt", GRAPH.replace('"m"', '"n"'))
    assert 0 == check(repository / "graphs/g", graph)
    graph.write_text(GRAPH)
    assert 1 == check(repository / "graphs/g", graph)


def test_a_model_that_leaves_tensors_to_its_backend_is_not_guessed(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only the model file says cannot be checked offline: a warning tells so, and no error is made up."""
    write(repository / "model/m/config.pbtxt", 'backend: "onnxruntime"\nmax_batch_size: 8\n')
    assert check(repository / "graphs/g", "--repository", repository) == 0
    captured = capsys.readouterr()
    assert "warning: inputs or outputs of m are not in the configuration" in captured.out
    assert captured.err == "1 file, 0 errors, 1 warning\n"


def test_a_broken_model_of_the_repository_is_reported_with_the_graph(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph cannot be right over a model that cannot be loaded, so the model's error is shown too."""
    config = write(repository / "model/m/config.pbtxt", CONFIG.replace("onnxruntime", "onxruntime"))
    assert check(repository / "graphs/g", "--repository", repository) == 1
    shown = capsys.readouterr().out
    assert f"{config}:2:" in shown
    assert f"model 'm' is not ready: its configuration has errors: {config.resolve()}" in shown


def test_a_backend_belongs_to_its_service(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A transform of postprocess is no backend of the model service."""
    config = write(repository / "model/p/config.pbtxt", CONFIG.replace("onnxruntime", "softmax"))
    assert check(config) == 1
    assert "'softmax'" in capsys.readouterr().out


def test_json_and_github_formats_carry_file_line_column_and_code(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Machines get the same findings: a JSON list, or GitHub's workflow commands with special characters escaped."""
    graph = write(repository / "100%,graphs/graph.pbtxt", GRAPH.replace('"m"', '"mm"'))
    assert check(graph, "--repository", repository, "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert list(found) == ["file", "line", "column", "message", "code", "severity"]
    assert (found["file"], found["line"], found["code"], found["severity"]) == (str(graph), 6, "G002", "error")
    assert check(graph, "--repository", repository, "--github") == 1
    line = capsys.readouterr().out.strip()
    assert line.startswith("::error file=")
    assert f"100%25%2Cgraphs/graph.pbtxt,line=6,col={found['column']},title=G002::unknown model 'mm'" in line


def test_a_configuration_is_named_as_it_was_given(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative path stays one, so that GitHub finds the file; what has no line names none."""
    monkeypatch.chdir(repository)
    config = write(repository / "model/m/config.pbtxt", CONFIG.replace("TYPE_FP32", "TYPE_FP33"))
    assert check("model") == 1
    assert capsys.readouterr().out.startswith("model/m/config.pbtxt:4:")
    config.write_text("")
    assert check("model", "--github") == 1
    assert capsys.readouterr().out.startswith("::error file=model/m/config.pbtxt,title=weft::")


def test_github_gets_paths_from_the_working_directory_on(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path is what stands in the pull request, however it was given; other folders keep theirs."""
    monkeypatch.chdir(repository)
    write(repository / "graphs/g/1/graph.pbtxt", 'name: "g" nod { }')
    assert check(repository / "graphs/g", "--github") == 1
    assert capsys.readouterr().out.startswith("::error file=graphs/g/1/graph.pbtxt,line=1,col=11,title=G001::")
    monkeypatch.chdir(repository / "model")
    assert check(repository / "graphs/g", "--github") == 1
    assert capsys.readouterr().out.startswith(f"::error file={repository}/graphs/g/1/graph.pbtxt,line=1,")


def test_a_graph_that_does_not_parse_has_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That its models are not known is said of a graph only once it can be read."""
    monkeypatch.chdir(tmp_path)
    graph = write(tmp_path / "loose.pbtxt", "name: ")
    assert check(graph) == 1
    assert capsys.readouterr().err == "1 file, 1 error, 0 warnings\n"
    graph.write_text(GRAPH)
    assert check(graph) == 0
    assert capsys.readouterr().err == "1 file, 0 errors, 1 warning\n"


def test_what_is_wrong_in_a_nested_graph_is_said_once(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many graphs run it."""
    for name in ("g1", "g2"):
        text = GRAPH.replace('"g"', f'"{name}"').replace('model_name: "m"', 'graph: "g"')
        write(repository / f"graphs/{name}/1/graph.pbtxt", text)
    write(repository / "graphs/g/1/graph.pbtxt", 'name: "g" nod { }')
    assert check(repository, "--repository", repository) == 1
    assert capsys.readouterr().out.count("unknown field 'nod'") == 1


def test_a_file_that_cannot_be_read_is_an_error_beside_the_others(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is checked all the same."""
    graph = write(repository / "graphs/g/1/graph.pbtxt", GRAPH.replace("8", "-8"))
    assert check("/proc/self/mem", graph) == 1
    captured = capsys.readouterr()
    assert "/proc/self/mem: error: cannot read '/proc/self/mem': Input/output error" in captured.out
    assert f"{graph}:3:" in captured.out


def test_a_folder_that_cannot_be_read_is_not_passed_over(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is told that all is well where not everything was seen; status 2."""
    scandir = os.scandir

    def guarded(path: Path) -> object:
        if str(path).endswith("graphs"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert check(repository) == 2
    assert f"weft check: cannot read '{repository}/graphs': Permission denied" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_crash(repository: Path) -> None:
    """As in `weft check ... | head`: status 1 and no traceback."""
    write(repository / "graphs/g/1/graph.pbtxt", "broken {")
    command = [sys.executable, "-m", "weft.cli", "check", str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(20) == 1


def test_json_of_no_findings_is_an_empty_list(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program always reads JSON."""
    assert check(repository, "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("arguments", [["missing"], ["."], ["model", "--repository", "missing"]])
def test_nothing_to_check_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """A path that does not exist, or a folder without files to check, ends with status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert check(*arguments) == 2


def test_files_are_found_once_and_hidden_folders_left_out(repository: Path) -> None:
    """A file that is given twice is checked once; what is below a hidden folder is not."""
    write(repository / ".git/graph.pbtxt", "broken {")
    graph = repository / "graphs/g/1/graph.pbtxt"
    found = find_files([graph, repository])
    assert sorted(found) == sorted([graph, repository / "graphs/e/config.pbtxt", repository / "model/m/config.pbtxt"])


def test_a_pipe_is_not_waited_for(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has the name of a graph or configuration and is no regular file is passed over, with a message."""
    pipes = [repository / "model/pipe/config.pbtxt", repository / "graphs/pipe/1/graph.pbtxt"]
    for pipe in pipes:
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
    assert check(repository) == 1
    captured = capsys.readouterr()
    assert [
        f"{pipe}: error: cannot read '{pipe}': it is no regular file" for pipe in pipes
    ] == captured.out.splitlines()
    assert captured.err.endswith("5 files, 2 errors, 0 warnings\n")


def test_nothing_that_runs_models_is_imported(repository: Path) -> None:
    """A check needs neither the model nor what runs it."""
    code = (
        "import sys; from weft.cli.__main__ import main; "
        f"status = main(['check', {str(repository)!r}, '--repository', {str(repository)!r}]); "
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'onnxruntime', 'tokenizers', 'PIL', 'grpc')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
