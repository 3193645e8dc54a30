"""`weft explain` on files, without a server."""

import json
from pathlib import Path

import pytest
from tests.unit.tools.graphs import repository

from weft.cli.__main__ import main

GRAPH = """name: "g" platform: "graph" max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] } ]
policy { timeout_ms: 50 }
node { name: "root" switch { on: 'get(parameters, "tier", "std")'
  step { name: "gold" case: "gold" model_name: "lang_id" }
  step { name: "slow" when: 'text(inputs.TEXT) == "slow"' model_name: "lang_id" }
  step { name: "rest" otherwise: true model_name: "lang_id" policy { timeout_ms: 80 } } } }
"""
USED = "gold, slow, rest"


@pytest.fixture
def explain(tmp_path: Path, capsys):
    """Runs the command on graph `g`; returns status, standard output and standard error."""
    folder = repository(tmp_path / "repository", GRAPH)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["explain", "g", "--repository", str(folder), *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_tree(explain):
    """Each step has a mark, its target, and why; below it what decides it and its limits."""
    status, out, err = explain()
    assert (0, "") == (status, err)
    assert [
        "g/1",
        "root switch",
        '│    on get(parameters, "tier", "std") = "std"',
        "│    at most 50 ms",
        '├─ - gold -> lang_id  skipped: case "gold"',
        '├─ ? slow -> lang_id  when text(inputs.TEXT) == "slow" = ?',
        "│       ? depends on TEXT of the request",
        "└─ ? rest -> lang_id  otherwise",
        "        ? depends on TEXT of the request",
        "        timeout 80 ms; at most 50 ms are left by what is around it",
        "",
        "+ runs   ? may run   - does not   ! fails   ~ after a failure, or a copy",
        "calls at most: 1",
        "time at most: 50 ms, the deadline; the longest path: root[slow] without timeout",
    ] == out.splitlines()


def test_json_has_the_same(explain):
    """--json gives one object: calls, time and the tree."""
    status, out, _ = explain("--json", "--param", "tier=gold", "--shape", "TEXT=2,1")
    found = json.loads(out)
    assert (0, "g/1", 2, 1, 50) == (status, found["graph"], found["num_rows"], found["num_calls"], found["max_ms"])
    assert [("root[gold]", "runs"), ("root[slow]", "skipped"), ("root[rest]", "skipped")] == [
        (step["path"], step["fate"]) for step in found["root"]["steps"]
    ]
    assert ['on get(parameters, "tier", "std") = "gold"'] == found["root"]["decisions"]


def test_a_value_may_be_in_a_file(explain, tmp_path):
    """--input NAME=@FILE reads the JSON of the value."""
    (tmp_path / "text.json").write_text('"slow"')
    _, out, _ = explain("--input", f"TEXT=@{tmp_path / 'text.json'}")
    assert "├─ + slow -> lang_id" in out


def test_a_request_that_fails_is_explained_all_the_same(explain):
    """The exit status tells of the command, not of the request; the client's error is shown whole."""
    status, out, _ = explain("--shape", "TEXT=2,1")
    assert 0 == status
    assert "! root switch" in out
    assert "the request fails: INVALID_ARGUMENT: g/1: root: when 'text(inputs.TEXT) == \"slow\"'" in out
    assert "send rows one by one" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", 'TXT="a"'], "graph 'g' has no input 'TXT'; did you mean 'TEXT'?"),
        (["--shape", "TXT=1"], "graph 'g' has no input 'TXT'; did you mean 'TEXT'?"),
        (["--output", "LANGS"], "graph 'g' has no output 'LANGS'; did you mean 'LANG'?"),
        (["--shape", "TEXT=a"], "shape 'a' of input 'TEXT' is no list of numbers; write 1,3"),
        (["--shape", "TEXT=1,2,3"], "shape [1, 2, 3] of input 'TEXT' does not fit [-1, 1]"),
        (["--shape", "TEXT=1,-1"], "shape [1, -1] of input 'TEXT' does not fit [-1, 1]"),
        (["--shape", f"TEXT={10**19},1"], f"shape [{10**19}, 1] of input 'TEXT' is of {10**19} elements"),
        (["--shape", "TEXT=9,1"], "a batch of 9 rows; graph 'g' takes 1 to 8"),
        (["--shape", "TEXT=1", "--input", 'TEXT="a"'], "input 'TEXT' is given twice; a value has a shape already"),
        (["--input", "TEXT=7"], "value of input 'TEXT' does not fit BYTES: got 7"),
        (
            ["--header", "x-graph-route=ab=B"],
            "header 'x-graph-route' names node 'ab'; the splitters of this graph are: none",
        ),
    ],
)
def test_what_cannot_be_asked(explain, arguments, message):
    """Unknown names and values that do not fit are refused with exit status 2, the nearest name beside them."""
    assert (2, "", f"weft explain: {message}\n") == explain(*arguments)


def test_a_file_that_is_not_there(explain, tmp_path):
    """A file of a value is named if it cannot be read."""
    status, _, err = explain("--input", f"TEXT=@{tmp_path / 'none'}")
    assert (2, f"weft explain: cannot read '{tmp_path / 'none'}': No such file or directory\n") == (status, err)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--param", "teir=gold"], "note: no condition of graph 'g' reads parameter 'teir'; did you mean 'tier'?"),
        (["--header", "tier=gold"], "note: no condition of graph 'g' reads header 'tier'"),
    ],
)
def test_a_name_that_no_condition_reads_is_noted(explain, arguments, note):
    """A parameter or header that changes nothing, perhaps mistyped, is told of; models may read it still."""
    status, _, err = explain(*arguments)
    assert (0, f"weft explain: {note}\n") == (status, err)


def test_long_lines_are_cut_in_text_only(tmp_path, capsys):
    """A condition of thousands of characters does not fill the screen; JSON has it whole."""
    condition = " && ".join(f'text(inputs.TEXT) != "{number}"' for number in range(100))
    graph = GRAPH.replace('text(inputs.TEXT) == "slow"', condition)
    folder = repository(tmp_path / "repository", graph)
    arguments = ["explain", "g", "--repository", str(folder)]
    assert 0 == main(arguments)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 200
    assert 0 == main([*arguments, "--json"])
    slow = json.loads(capsys.readouterr().out)["root"]["steps"][1]
    assert [f"when {condition} = ?"] == slow["why"]


def test_a_graph_with_errors_is_not_explained(tmp_path, capsys):
    """Errors are shown as by `weft check`, with exit status 1."""
    folder = repository(tmp_path / "repository", GRAPH.replace("inputs.TEXT", "inputs.TXT"))
    assert 1 == main(["explain", "g", "--repository", str(folder)])
    assert "unknown tensor 'TXT'; did you mean 'TEXT'?  [G011]" in capsys.readouterr().err
