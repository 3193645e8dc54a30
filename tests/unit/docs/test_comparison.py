"""What docs/comparison.md says of lines and of Weft is so; the other systems: tests/exams/comparison.py."""

import os
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples.cookbook import PAGE as COOKBOOK
from examples.cookbook import write_repository

import weft
from weft.cli import __main__ as cli

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/comparison"
PAGE = ROOT / "docs/comparison.md"
PIPELINES = ["classify", "ab_test", "cascade", "vote", "read_page"]
FILES = ["weft_graph.py", "graph.pbtxt", "kserve.yaml", "seldon.yaml", "ray_serve.py", "bentoml_service.py"]
#: What models that a person writes beside a file, because its language has no word for it, are called.
OWN_MODELS = {"vote-digits", "accept-digits"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``models`` is the repository of the examples."""
    folder = tmp_path_factory.mktemp("comparison")
    write_repository(folder / "models", COOKBOOK.read_text())
    name_digit = runpy.run_path(str(EXAMPLES / "models/weft_models.py"))["name_digit"]
    weft.write(name_digit, to=folder / "models")
    return folder


@pytest.fixture
def graph(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "weft.Graph"]:
    """Runs the Python of a pipeline, changed, over the repository."""

    def made(name: str, old: str = "", new: str = "", folder: Path = models) -> Any:
        monkeypatch.chdir(folder)
        code = (EXAMPLES / name / "weft_graph.py").read_text()
        assert old in code
        file = folder / "weft_graph.py"
        file.write_text(code.replace(old, new))
        return runpy.run_path(str(file))[name]

    return made


@pytest.mark.parametrize("name", PIPELINES)
def test_python_and_the_file_are_equal(name: str, graph: Callable[..., "weft.Graph"], models: Path) -> None:
    """Word by word; WEFT_UPDATE_GOLDEN writes the file. Neither has a warning."""
    file, made = EXAMPLES / name / "graph.pbtxt", graph(name)
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        file.write_text(made.text)
    assert [] == made.diagnostics
    assert file.read_text() == made.text
    assert 0 == cli.main(["check", str(file), "--repository", str(models / "models")])


def num_lines(file: Path) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in file.read_text().splitlines())


def test_the_table_of_lines_is_true() -> None:
    """It has each file of each pipeline; WEFT_UPDATE_GOLDEN writes it."""
    rows = [
        f"| `{name}` | " + " | ".join(str(num_lines(EXAMPLES / name / file)) for file in FILES) + " |"
        for name in PIPELINES
    ]
    text = PAGE.read_text()
    begin, end = "<!-- lines -->\n", "<!-- end -->"
    head, _, rest = text.partition(begin)
    table, _, tail = rest.partition(end)
    header = "".join(table.splitlines(keepends=True)[:2])
    expected = header + "".join(f"{row}\n" for row in rows)
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        PAGE.write_text(head + begin + expected + end + tail)
    assert expected == table


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", ["kserve", "seldon"])
def test_a_file_of_kubernetes_is_converted(
    name: str, kind: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``weft convert`` writes each; what calls no model of one's own, and loses nothing, passes the check as it is."""
    repository = tmp_path / "models"
    for config in (models / "models").glob("*/*/config.pbtxt"):  # names of Kubernetes have hyphens
        place = repository / config.parent.parent.name / config.parent.name.replace("_", "-")
        shutil.copytree(config.parent, place)
        (place / "config.pbtxt").write_text(re.sub(r'(?m)^name: ".*"\n', "", config.read_text()))
    source = EXAMPLES / name / f"{kind}.yaml"
    status = cli.main(["convert", str(source), "--repository", str(repository), "-o", str(repository / "graphs")])
    told = capsys.readouterr().err
    written = sorted((repository / "graphs").glob("*/1/graph.pbtxt"))
    print(status, told, [str(w) for w in written])
    assert written
