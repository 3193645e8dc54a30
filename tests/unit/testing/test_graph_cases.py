"""Cases of graphs: what passes, what fails and why, faults, fakes, real models, the clock, coverage and the command."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.case_files import Case
from tests.case_files import cases as case_file
from tests.repositories import NUMBER_BATCHES, write_graph, write_model

import weft
from weft.base.text.pbtxt import PbtxtError
from weft.cli.__main__ import main
from weft.testing import cases
from weft.testing.graph_cases import suites_of

ROOT = Path(__file__).parents[3]
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", {answer})]) for x in inputs]
"""
STREAM = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            sender = request.get_response_sender()
            for number in (1, 2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * number)]))
            if x.max() > 90:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("too large")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HEAD = """name: "{name}" platform: "graph" max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }}
"""
GRAPHS = {
    "sums": """
node { name: "root" sequence {
  step {
    name: "double" model_name: "double" output_map { key: "Y" value: "Z" }
    fallback { model_name: "increment" output_map { key: "Y" value: "Z" } }
  }
  step { name: "choose" node: "by" input_map { key: "X" value: "Z" } }
} }
node { name: "by" switch {
  step {
    name: "high" when: 'get(parameters, "level", "low") == "high"' model_name: "double"
    dependency: SOFT default { output: "Y" number: 9 }
  }
  step {
    name: "low" otherwise: true model_name: "increment"
    policy { retry { attempts: 3 backoff_ms: 1000 on: "UNAVAILABLE" on: "ABORTED" } }
  }
} }
""",
    "late": """
policy { timeout_ms: 5000 }
node { name: "root" cascade {
  step {
    name: "hedged" when: "request.remaining_ms > 1000" model_name: "double" dependency: SOFT
    policy { timeout_ms: 2000 hedge { after_ms: 700 } }
  }
  step { name: "last" model_name: "increment" }
} }
""",
    "cached": 'node { name: "root" sequence { step { model_name: "double" policy { cache { ttl_ms: 60000 } } } } }',
    "streams": 'node { name: "root" sequence { step { model_name: "stream" } } }',
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of numbers and graphs over them."""
    folder = tmp_path_factory.mktemp("repository")
    for name, answer in {"double": "2 * x", "increment": "x + 1"}.items():
        write_model(folder / "model", name, MODEL.format(answer=answer), NUMBER_BATCHES)
    decoupled = "model_transaction_policy { decoupled: true }\n"
    write_model(folder / "model", "stream", STREAM, NUMBER_BATCHES + decoupled)
    for name, text in GRAPHS.items():
        write_graph(folder / "graphs", name, HEAD.format(name=name) + text)
    return folder


def told(text: str, graph: str, repository: Path) -> str:
    """What comes of a file of cases."""
    file = repository / "graphs" / graph / "1" / "cases.pbtxt"
    file.write_text(text)
    try:
        (suite,) = suites_of(file, {})
    except PbtxtError as error:
        found = (f"{one.line}:{one.column}: {one.message}" for one in error.diagnostics)
        return "\n".join(found).replace(str(file.parent), "")
    lines = []
    for one in suite.run():
        lines += [f"{one.case.name}: {one.path}, {one.graph_ms:g} ms", *(f"  {fault}" for fault in one.faults)]
    return "\n".join(lines)


@case_file(Path(__file__).with_name("graph_cases.txt"))
def test_a_file_of_cases(case: Case, repository: Path) -> None:
    """What comes of it is what is written down."""
    case.check(told(case.option("head", "models: FAKE") + "\n" + case.text, case.option("graph", "sums"), repository))


def case_text(rest: str = "", name: str = "a") -> str:
    """A case of one row."""
    return f'case {{ name: "{name}" input {{ name: "X" number: 1 }} {rest} }} '


def test_golden_answers_are_written_and_compared(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--update` writes them beside the file, which stays as it is; another answer is a failure that names both."""
    file = repository / "graphs/sums/1/cases.pbtxt"
    text = '# Golden.\nmodels: FAKE fault { model: "increment" output { name: "Y" number: VALUE } }\n' + case_text(
        "golden: true"
    )
    file.write_text(text.replace("VALUE", "0.1"))
    assert 1 == main(["test", str(file)])
    assert "weft test --update writes it" in capsys.readouterr().out
    assert 0 == main(["test", str(file), "--update"])
    assert text.replace("VALUE", "0.1") == file.read_text()
    assert 0 == main(["test", str(file)])
    file.write_text(text.replace("VALUE", "0.2"))
    assert 1 == main(["test", str(file)])
    out = capsys.readouterr().out
    assert "0.2" in out
    assert "golden/a.0.json" in out
    for text in ("<<<<<<< HEAD", "[]", '{"Y": {}}', '{"Y": {"datatype": "FP32", "shape": [1, 1], "data": ["a"]}}'):
        (file.parent / "golden/a.0.json").write_text(text)
        (file.parent / "golden/a.1.json").write_text(text)
        assert 1 == main(["test", str(file)])
        out = capsys.readouterr().out
        assert "golden/a.0.json has no golden answers" in out
        assert "golden/a.1.json is of a response that did not come" in out


def test_the_command_tells_coverage_and_writes_junit_and_json(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no case reaches is listed, and fails if it is more than is allowed; reports of CI have each case."""
    file = repository / "graphs/sums/1/cases.pbtxt"
    high = 'parameter { key: "level" value: "high" } fault { step: "high" status: "INTERNAL" }'
    file.write_text("models: FAKE " + case_text() + case_text("error: 'INTERNAL'", "b"))
    junit = tmp_path / "junit.xml"
    assert 1 == main(["test", str(file), "--junit", str(junit)])
    out = capsys.readouterr().out
    assert "no case reaches switch root/choose/by[high]\n" in out
    assert "no case reaches default of root/choose/by[high]\n" in out
    assert "sums/1: 50 % covered, 3 of 6\n" in out
    suite = ElementTree.fromstring(junit.read_text())
    assert [("sums/1", "a", 0), ("sums/1", "b", 1)] == [
        (one.get("classname"), one.get("name"), len(one)) for one in suite
    ]
    file.write_text("models: FAKE " + case_text() + case_text(high, "b"))
    assert 0 == main(["test", str(file), "--json", "--require-coverage", "80"])
    facts = json.loads(capsys.readouterr().out)
    assert ["sums/1  a", "sums/1  b"] == [one["title"] for one in facts["cases"]]
    assert ["fallback root/double>increment"] == [
        name for name, is_in in facts["reached"]["sums/1"].items() if not is_in
    ]
    assert 1 == main(["test", str(file), "--require-coverage", "90"])
    assert 0 == main(["test", str(file), "-k", "b"])
    assert "1 case, 0 failed" in capsys.readouterr().out


def test_what_cannot_be_run_is_status_2(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such file, no graph beside it, no case of that name, a graph with an error, a file that is too large."""
    folder = tmp_path / "graphs/g/1"
    folder.mkdir(parents=True)
    file, graph = folder / "cases.pbtxt", folder / "graph.pbtxt"
    assert 2 == main(["test", str(file)])
    assert f"cannot read '{file}'" in capsys.readouterr().err
    file.write_text(case_text())
    assert 2 == main(["test", str(tmp_path)])
    assert "it belongs to no graph; its place is graphs/NAME/VERSION/" in capsys.readouterr().err
    (tmp_path / "model").symlink_to(repository / "model")
    graph.write_text(HEAD.format(name="g") + 'node { name: "root" sequence { step { model_name: "doubel" } } }')
    assert 2 == main(["test", "g", "--repository", str(tmp_path)])
    assert "graph.pbtxt:4:" in capsys.readouterr().err
    graph.write_text(HEAD.format(name="g") + 'node { name: "root" sequence { step { model_name: "double" } } }')
    assert 2 == main(["test", "g", "--repository", str(tmp_path), "-k", "b"])
    assert "no case; with 'b' in its name" in capsys.readouterr().err
    file.write_text(case_text() + " " * (5 << 20))
    assert 2 == main(["test", "g", "--repository", str(tmp_path)])
    assert "cases.pbtxt: error: " in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_told(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the model's reason; as a fake it is not needed."""
    write_model(tmp_path / "model", "double", "raise ValueError('no weights')", NUMBER_BATCHES)
    write_graph(tmp_path / "graphs", "g", HEAD.format(name="g") + GRAPHS["cached"])
    (tmp_path / "graphs/g/cases.pbtxt").write_text(case_text())
    assert 2 == main(["test", str(tmp_path)])
    assert "no weights" in capsys.readouterr().err
    (tmp_path / "graphs/g/cases.pbtxt").write_text('fake: "double" ' + case_text())
    assert 0 == main(["test", str(tmp_path)])


def test_cases_of_a_graph_in_python(repository: Path) -> None:
    """`weft.testing.cases` runs a file's, or a text's with a graph, and raises what is not as expected."""
    graph = weft.read(repository / "graphs/sums/1/graph.pbtxt")
    assert ["root.double;choose=by[low]"] == [one.path for one in cases(graph, "models: FAKE " + case_text())]
    with pytest.raises(AssertionError, match="sums/1  a: expected INTERNAL, got an answer"):
        cases(graph, "models: FAKE " + case_text("error: 'INTERNAL'"))
    with pytest.raises(PbtxtError, match="has no step 'no'"):
        cases(graph, "models: FAKE " + case_text("ran: 'no'"))


def test_the_cases_of_the_sample_graphs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of three graphs: a switch with fallbacks, a splitter with a shadow, and a cascade with real models."""
    status = main(["test", str(ROOT / "model_repository"), "--require-coverage", "80"])
    assert (0, True) == (status, "digits_cascade/1: 100 % covered" in (out := capsys.readouterr().out)), out
