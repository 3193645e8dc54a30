"""What docs/comparison.md says of lines and of Weft is so; the other systems: tests/exams/comparison.py."""

import itertools
import os
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.cookbook import PAGE as COOKBOOK
from examples.cookbook import write_repository

import weft
from weft.cli import __main__ as cli

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/comparison"
PAGE = ROOT / "docs/comparison.md"
TEXT = PAGE.read_text()
#: Messages, and other long code of its sentences.
SPANS = [span for span in re.findall(r"`([^`\n]+)`", TEXT) if len(span) > 40]
PIPELINES = ["classify", "ab_test", "cascade", "vote", "read_page"]
FILES = ["weft_graph.py", "graph.pbtxt", "kserve.yaml", "seldon.yaml", "ray_serve.py", "bentoml_service.py"]
#: A decoder whose tensor does not fit the classifiers.
DECODER = """backend: "python"
max_batch_size: 32
input [ {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "PIXELS" data_type: {datatype} dims: [ 1, {size}, {size} ] }} ]
"""
#: File -> status of ``weft convert``, and codes of what ``weft check`` says of the graph: a model of your own is not
#: there (G002), a tensor is one of KServe's model alone (G011), steps may fail (G010), names differ (G008).
CONVERTED = {
    "classify/kserve.yaml": (0, ""),
    "ab_test/kserve.yaml": (0, ""),
    "cascade/kserve.yaml": (1, "G011"),
    "vote/kserve.yaml": (0, "G002 G010"),
    "read_page/kserve.yaml": (0, "G008"),
    "classify/seldon.yaml": (0, ""),
    "ab_test/seldon.yaml": (1, ""),
    "cascade/seldon.yaml": (1, "G002 G010"),
    "vote/seldon.yaml": (1, "G002"),
    "read_page/seldon.yaml": (0, ""),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``models`` is the repository of the examples."""
    folder = tmp_path_factory.mktemp("comparison")
    write_repository(folder / "models", COOKBOOK.read_text())
    weft.write(runpy.run_path(str(EXAMPLES / "models/weft_models.py"))["name_digit"], to=folder / "models")
    return folder


@pytest.fixture
def made(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "weft.Graph"]:
    """Runs the Python of a pipeline, with a change, beside the repository of a folder."""

    def make(name: str, old: str = "", new: str = "", folder: Path = models) -> "weft.Graph":
        monkeypatch.chdir(folder)
        code = (EXAMPLES / name / "weft_graph.py").read_text()
        assert old in code
        file = tmp_path / "weft_graph.py"
        file.write_text(code.replace(old, new))
        graph: weft.Graph = runpy.run_path(str(file))[name]
        return graph

    return make


@pytest.mark.parametrize("name", PIPELINES)
def test_python_and_the_file_are_equal(name: str, made: Callable[..., "weft.Graph"], models: Path) -> None:
    """Word by word; WEFT_UPDATE_GOLDEN writes the file. Neither has a warning."""
    file, graph = EXAMPLES / name / "graph.pbtxt", made(name)
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        file.write_text(graph.text)
    assert [] == graph.diagnostics
    assert file.read_text() == graph.text
    assert 0 == cli.main(["check", str(file), "--repository", str(models / "models")])


def num_lines(file: Path) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in file.read_text().splitlines())


def test_the_table_of_lines_is_true() -> None:
    """It has each file of each pipeline; WEFT_UPDATE_GOLDEN writes it."""
    counts = {name: [str(num_lines(EXAMPLES / name / file)) for file in FILES] for name in PIPELINES}
    rows = [f"| [`{name}`](../examples/comparison/{name}) | {' | '.join(row)} |" for name, row in counts.items()]
    begin, end = "<!-- lines -->\n", "<!-- end -->"
    head, _, rest = TEXT.partition(begin)
    table, _, tail = rest.partition(end)
    expected = "".join(f"{row}\n" for row in [*table.splitlines()[:2], *rows])
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        PAGE.write_text(head + begin + expected + end + tail)
    assert expected == table


def test_programs_of_the_page_are_those_of_the_examples() -> None:
    """A block of Python is a file, whole."""
    files = {file.read_text() for file in EXAMPLES.glob("*/*.py")}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert 2 <= len(blocks)
    assert [] == [block for block in blocks if block not in files]


@pytest.mark.parametrize(
    ("old", "new", "datatype", "size"),
    [
        ("digits.PROBS", "digits.PROB", "", 0),
        ("m.digits_cnn", "m.digits_cnnn", "", 0),
        ("", "", "TYPE_FP64", 8),
        ("", "", "TYPE_FP32", 9),
    ],
    ids=["name", "missing", "datatype", "shape"],
)
def test_a_mistake_is_told_while_the_graph_is_written(
    old: str, new: str, datatype: str, size: int, made: Callable[..., "weft.Graph"], models: Path, tmp_path: Path
) -> None:
    """On its line, with the words of the page; and by the check of the file, but for the name, which it has not."""
    folder = models
    if datatype:
        folder = tmp_path / "changed"
        shutil.copytree(models / "models", folder / "models", symlinks=True)
        decoder = folder / "models/preprocess/decode_digit"
        decoder.unlink()
        (decoder / "1").mkdir(parents=True)
        (decoder / "config.pbtxt").write_text(DECODER.format(datatype=datatype, size=size))
        (decoder / "1/model.py").write_text("class TritonPythonModel: ...\n")
    with pytest.raises(weft.GraphError) as raised:
        made("classify", old, new, folder)
    (diagnostic,) = raised.value.diagnostics
    assert Path(diagnostic.file).name == "weft_graph.py"
    assert any(diagnostic.message.startswith(span) for span in SPANS), diagnostic.message
    if new != "digits.PROB":
        file = tmp_path / "graph.pbtxt"
        file.write_text(
            (EXAMPLES / "classify/graph.pbtxt").read_text().replace(*(old[2:], new[2:]) if old else ("", ""))
        )
        assert 1 == cli.main(["check", str(file), "--repository", str(folder / "models")])


def test_a_step_that_fails_half_of_the_time(made: Callable[..., "weft.Graph"]) -> None:
    """Half of the requests fail and say where, as on the page; none with the retry of the page."""
    image = (ROOT / "model_repository/data/digits/7.png").read_bytes()
    (retry,) = re.findall(r"`(retry=\{.*?\})`", TEXT)
    for change, num_failed in ((".PIXELS)", 20), (f".PIXELS, {retry})", 0)):
        turns = itertools.count()

        def classify(PIXELS: Any, turns: "itertools.count[int]" = turns) -> Any:  # noqa: N803
            if next(turns) % 2:
                raise weft.errors.InternalError("division by zero")
            return {"LABEL": [[7]], "PROBS": np.eye(10, dtype=np.float32)[[7]]}

        failures = []
        with made("classify", ".PIXELS)", change).loaded({"digits_cnn": weft.fake(classify)}) as graph:
            for _ in range(40):
                try:
                    assert graph.run({"IMAGE": [[image]]}).NAME.tolist() == [[b"seven"]]
                except weft.WeftError as error:
                    failures.append(str(error).partition(" (error id")[0])
        assert num_failed == len(failures)
        assert set(failures) <= set(SPANS)


@pytest.mark.parametrize(("file", "expected"), CONVERTED.items())
def test_a_file_of_kubernetes_is_converted(
    file: str, expected: tuple[int, str], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``weft convert`` writes each, and says with CHECK what the check then finds, if anything."""
    repository = tmp_path / "models"
    for config in (models / "models").glob("*/*/config.pbtxt"):  # names of Kubernetes have hyphens
        place = repository / config.parent.parent.name / config.parent.name.replace("_", "-")
        shutil.copytree(config.parent, place)
        (place / "config.pbtxt").write_text(re.sub(r'(?m)^name: ".*"\n', "", config.read_text()))
    graphs = repository / "graphs"
    status = cli.main(["convert", str(EXAMPLES / file), "--repository", str(repository), "-o", str(graphs)])
    has_doubts = "CHECK" in capsys.readouterr().err
    cli.main(["check", *map(str, graphs.glob("*/1/graph.pbtxt")), "--repository", str(repository)])
    codes = sorted({*re.findall(r"\[(G\d+)\]", capsys.readouterr().out)})
    assert expected == (status, " ".join(codes))
    assert has_doubts or not codes
