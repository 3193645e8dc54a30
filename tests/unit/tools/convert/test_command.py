"""`weft convert` as a command."""

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest

from weft.cli.__main__ import main

GOLDEN = Path(__file__).with_name("golden")
CHAIN = GOLDEN / "kserve_sequence.yaml"
MODEL = """
backend: "onnxruntime" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
LOCK = """
model { name: "one" version: "1" target: "model" max_batch_size: 4
  input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } }
"""
ONE = """
apiVersion: serving.kserve.io/v1alpha1
kind: InferenceGraph
metadata: {name: NAME}
spec: {nodes: {root: {routerType: Sequence, steps: [{serviceName: one, dependency: Hard}]}}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model repository with the model `one`."""
    folder = tmp_path / "models" / "model" / "one"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(MODEL)
    return tmp_path / "models"


def test_the_graph_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """With warnings on standard error, each with its place; questions are no failure."""
    assert 0 == main(["convert", str(CHAIN)])
    captured = capsys.readouterr()
    assert captured.out.startswith("# Converted from InferenceGraph 'text-chain' in kserve_sequence.yaml.\n")
    assert f"{CHAIN}:12:1: warning: the file has no types." in captured.err


def test_types_of_a_repository_make_a_graph_that_passes_the_check(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file says what it brings; it stands where the router looks for it."""
    (tmp_path / "g.yaml").write_text(ONE.replace("NAME", "mine"))
    folder = repository / "graphs"
    assert 0 == main(["convert", str(tmp_path / "g.yaml"), "--repository", str(repository), "-o", str(folder)])
    path = folder / "mine" / "1" / "graph.pbtxt"
    assert f"wrote {path}; next: weft check {path}\n" == capsys.readouterr().err
    assert 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]' in path.read_text()
    assert 0 == main(["check", str(path), "--repository", str(repository)])


def test_types_of_a_lock_file_do_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `weft lock` wrote; the graph passes `weft check` with it."""
    (tmp_path / "g.yaml").write_text(ONE.replace("NAME", "mine"))
    (tmp_path / "a.lock").write_text(LOCK)
    assert 0 == main(["convert", str(tmp_path / "g.yaml"), "--lock", str(tmp_path / "a.lock"), "-o", str(tmp_path)])
    path = tmp_path / "mine" / "1" / "graph.pbtxt"
    assert 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]' in path.read_text()
    assert 0 == main(["check", str(path), "--lock", str(tmp_path / "a.lock")])
    (tmp_path / "a.lock").write_text("modle {}")
    capsys.readouterr()
    assert 2 == main(["convert", str(tmp_path / "g.yaml"), "--lock", str(tmp_path / "a.lock")])
    assert "did you mean 'model'?" in capsys.readouterr().err


def test_a_model_that_leaves_its_tensors_to_the_backend_is_not_known(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that is not there; the warning stands at the step and says why."""
    (repository / "model" / "one" / "config.pbtxt").write_text('backend: "onnxruntime"')
    (tmp_path / "g.yaml").write_text(ONE)
    assert 0 == main(["convert", str(tmp_path / "g.yaml"), "--repository", str(repository)])
    captured = capsys.readouterr()
    at = ONE.splitlines()[4].index("{serviceName") + 1
    why = "no signature of 'one': its configuration does not have all inputs and outputs\n"
    assert f"{tmp_path}/g.yaml:5:{at}: warning: {why}" in captured.err
    assert "undeclared" not in captured.out


GRAPH = """
name: "inner" platform: "graph" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence { step { model_name: "one" } } }
"""
SELDON = "{{apiVersion: mlops.seldon.io/v1alpha1, kind: {kind}, metadata: {{name: mine}}, spec: {spec}}}"


@pytest.mark.parametrize(
    "text",
    [
        ONE.replace("NAME", "mine").replace("serviceName: one", "serviceName: inner"),
        SELDON.format(
            kind="Experiment",
            spec="{resourceType: pipeline, candidates: [{name: inner, weight: 1}, {name: x, weight: 0}]}",
        ),
        SELDON.format(
            kind="Pipeline",
            spec="{input: {externalInputs: [inner.outputs], tensorMap: {inner.outputs.Y: X}}, steps: [{name: one}], "
            "output: {steps: [one]}}",
        ),
    ],
    ids=["kserve", "experiment", "pipeline"],
)
@pytest.mark.parametrize("declared", [True, False])
def test_graphs_of_the_repository_have_signatures(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str], text: str, declared: bool
) -> None:
    """A step may call one; outputs that its file leaves out are those of its root."""
    path = repository / "graphs" / "inner" / "1" / "graph.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(GRAPH if declared else GRAPH.replace("output [", "#"))
    (tmp_path / "g.yaml").write_text(text)
    call = ["convert", str(tmp_path / "g.yaml"), "--repository", str(repository), "-o", str(repository / "graphs")]
    assert 0 == main(call)
    assert "no signature" not in capsys.readouterr().err
    written = repository / "graphs" / "mine" / "1" / "graph.pbtxt"
    assert 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]' in written.read_text()
    assert 0 == main(["check", str(written), "--repository", str(repository)])


def test_what_is_wrong_with_a_signature_has_its_place(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning at the step that calls it, and one in the graph or configuration of the repository."""
    path = repository / "graphs" / "inner" / "1" / "graph.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(GRAPH.replace("max_batch_size", "max_batchsize"))
    config = repository / "model" / "one" / "config.pbtxt"
    config.write_text(MODEL.replace("dims", "dim"))
    steps = "[{serviceName: one},\n {serviceName: inner}]"
    (tmp_path / "g.yaml").write_text(ONE.replace("[{serviceName: one, dependency: Hard}]", steps))
    assert 0 == main(["convert", str(tmp_path / "g.yaml"), "--repository", str(repository)])
    told = capsys.readouterr().err
    assert f"{tmp_path}/g.yaml:6:2: warning: no signature of 'inner'\n" in told
    assert f"{path}:2:33: warning: " in told
    assert f"{config}:3:42: warning: " in told


def test_questions_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line says how many lines of the file ask one."""
    path = tmp_path / "new" / "graph.pbtxt"
    assert 0 == main(["convert", str(CHAIN), "-o", str(path)])
    assert f"wrote {path}; 1 line says CHECK; next: weft check {path}\n" in capsys.readouterr().err
    assert 1 == path.read_text().count("CHECK")


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As from kubectl; lists of Kubernetes are looked into, with a byte order mark before them or not."""
    items = "".join(f"- {line}\n" if i == 0 else f"  {line}\n" for i, line in enumerate(ONE.strip().splitlines()))
    text = "\ufeffapiVersion: v1\nkind: List\nitems:\n" + items
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert 0 == main(["convert", "-"])
    captured = capsys.readouterr()
    assert 'name: "NAME"' in captured.out
    assert "standard input:4:3: warning:" in captured.err


def test_several_graphs_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file is one graph; nothing is written in part."""
    (tmp_path / "g.yaml").write_text("---".join(ONE.replace("NAME", name) for name in ("a", "b")))
    assert 2 == main(["convert", str(tmp_path / "g.yaml"), "-o", str(tmp_path / "graph.pbtxt")])
    assert "the file has 2 graphs: a, b; give a folder with -o" in capsys.readouterr().err
    assert not (tmp_path / "graph.pbtxt").exists()
    assert 0 == main(["convert", str(tmp_path / "g.yaml"), "-o", str(tmp_path / "out")])
    assert ["a", "b"] == sorted(path.parent.parent.name for path in (tmp_path / "out").rglob("graph.pbtxt"))


def test_two_graphs_of_one_name_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is written."""
    (tmp_path / "g.yaml").write_text("---".join([ONE, ONE]))
    assert 1 == main(["convert", str(tmp_path / "g.yaml"), "-o", str(tmp_path / "out")])
    assert "error: a second graph is called 'NAME'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DIFFERENT = """
apiVersion: serving.kserve.io/v1alpha1
kind: InferenceGraph
metadata: {name: mine}
spec: {nodes: {root: {routerType: Switch, steps: [{serviceName: one, condition: "[@this].#(X.0.1>2)"}]}}}
"""


def test_what_changes_answers_is_status_1(tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The graph is written and says so; without types, where more is open, it is a question of status 0."""
    (tmp_path / "g.yaml").write_text(DIFFERENT)
    call = ["convert", str(tmp_path / "g.yaml"), "-o", str(tmp_path / "out")]
    assert 1 == main([*call, "--repository", str(repository)])
    text = (tmp_path / "out" / "mine" / "1" / "graph.pbtxt").read_text()
    assert 1 == text.count("# CHECK: answers may differ: ")
    assert "1 line says CHECK, 1 of them that answers may differ; next: weft check" in capsys.readouterr().err
    assert 1 == main(["convert", str(tmp_path / "g.yaml"), "--repository", str(repository)])
    assert text == capsys.readouterr().out


def test_a_graph_that_exists_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are those beside it written; --force does, but never over the file that is read."""
    (tmp_path / "g.yaml").write_text("---".join(ONE.replace("NAME", name) for name in ("a", "b")))
    call = ["convert", str(tmp_path / "g.yaml"), "-o", str(tmp_path / "out")]
    existing = tmp_path / "out" / "b" / "1" / "graph.pbtxt"
    existing.parent.mkdir(parents=True)
    existing.write_text("mine")
    assert 2 == main(call)
    assert f"weft convert: {existing} exists; nothing was written. --force writes over it\n" in capsys.readouterr().err
    assert "mine" == existing.read_text()
    assert not (tmp_path / "out" / "a").exists()
    assert 0 == main([*call, "--force"])
    assert existing.read_text().startswith("# Converted from InferenceGraph 'b'")
    (tmp_path / "g.pbtxt").write_text(ONE)
    for more in ([], ["--force"]):
        assert 2 == main(["convert", str(tmp_path / "g.pbtxt"), "-o", str(tmp_path / "g.pbtxt"), *more])
        assert "is the file that is converted" in capsys.readouterr().err
    assert ONE == (tmp_path / "g.pbtxt").read_text()


def test_a_list_of_kubectl_in_json_is_several_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several kinds, with what a cluster adds to an object; each graph has its folder."""
    graph = {"nodes": {"root": {"routerType": "Sequence", "steps": [{"serviceName": "one"}]}}}
    pipeline = {"steps": [{"name": "one"}], "output": {"steps": ["one"]}}
    objects = [
        {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "InferenceGraph",
            "metadata": {"name": "a"},
            "spec": graph,
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {}, "status": {"x": None}},
        {
            "apiVersion": "mlops.seldon.io/v1alpha1",
            "kind": "Pipeline",
            "metadata": {"name": "b", "uid": "1", "annotations": {"kubectl.kubernetes.io/last-applied": "{}"}},
            "spec": pipeline,
            "status": {"conditions": []},
        },
    ]
    (tmp_path / "g.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    assert 0 == main(["convert", str(tmp_path / "g.json"), "-o", str(tmp_path / "out")])
    assert ["a", "b"] == sorted(path.parent.parent.name for path in (tmp_path / "out").rglob("graph.pbtxt"))
    listed = {
        "apiVersion": "mlops.seldon.io/v1alpha1",
        "kind": "PipelineList",
        "items": [{"metadata": {"name": "c"}, "spec": pipeline}],
    }
    (tmp_path / "p.json").write_text(json.dumps(listed))
    assert 0 == main(["convert", str(tmp_path / "p.json")])
    assert 'name: "c"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"a: [1", 1, "g.yaml:2:1: error: not YAML"),
        (b"\xff", 2, "g.yaml is not UTF-8 text: byte 0xff at offset 0"),
        (b"", 2, "and no Pipeline or Experiment of Seldon Core 2; it has nothing"),
        (b"kind: Service\n---\n3\n---\n[1]", 2, "it has Service, no kind\n"),
        (b"apiVersion: mlops.seldon.io/v1alpha1\nkind: Model\nmetadata: {name: m}", 2, "it has Model\n"),
        (b"apiVersion: mlops.seldon.io/v1alpha1\nkind: Pipeline", 1, "error: the Pipeline has no 'steps'"),
        (b"x" * 10_000_000, 2, "g.yaml has more than 2 MiB, the limit"),
        (ONE.replace("Sequence", "Chain").encode(), 1, "error: unknown routerType 'Chain'"),
    ],
    ids=["syntax", "binary", "empty", "others", "models", "hollow", "huge", "wrong"],
)
def test_a_file_that_cannot_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, status: int, message: str
) -> None:
    """The reason on standard error, nothing on standard output; 1: the file is wrong, 2: so is the call."""
    (tmp_path / "g.yaml").write_bytes(content)
    assert status == main(["convert", str(tmp_path / "g.yaml")])
    captured = capsys.readouterr()
    assert message in captured.err
    assert "" == captured.out


def test_files_and_folders_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named."""
    assert 2 == main(["convert", str(tmp_path / "no.yaml")])
    assert 2 == main(["convert", str(CHAIN), "--repository", str(tmp_path / "none")])
    (tmp_path / "file").write_text("")
    assert 2 == main(["convert", str(CHAIN), "-o", str(tmp_path / "file" / "x.pbtxt")])
    first, second, *_, third = capsys.readouterr().err.splitlines()
    assert f"weft convert: cannot read '{tmp_path}/no.yaml': No such file or directory" == first
    assert f"weft convert: cannot read '{tmp_path}/none': no such folder" == second
    assert third.startswith(f"weft convert: cannot write '{tmp_path}/file'")


def test_without_pyyaml_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an extra, because nothing else needs it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("weft.cli.commands.convert.find_spec", lambda name: None if name == "yaml" else find_spec(name))
    assert 2 == main(["convert", str(CHAIN)])
    assert "PyYAML is not installed; install it with: pip install 'weft-mesh[convert]'" in capsys.readouterr().err
