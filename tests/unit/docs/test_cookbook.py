"""Files and commands of docs/cookbook.md are right as they stand there; tests/integration sends the requests."""

import re
import shlex
from pathlib import Path

import pytest
from examples.cookbook import PAGE, files_of, write_repository

from weft.cli import __main__ as weft

TEXT = PAGE.read_text()
GRAPHS = sorted(path for path, _ in files_of(TEXT) if path.startswith("graphs/"))
COMMANDS = re.findall(r"(?m)^\$ (?:weft .*)|`(?:weft \w+ .*)`", TEXT)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of the page."""
    return write_repository(tmp_path_factory.mktemp("cookbook"), TEXT)


def test_every_graph_passes_the_check(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a warning, over the models of the page and the samples."""
    assert (0, "") == (weft.main(["check", *(str(repository / graph) for graph in GRAPHS)]), capsys.readouterr().out)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_is_drawn_and_explained(graph: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every model that the file calls is in the picture; the way of a request is told without a server."""
    assert 0 == weft.main(["draw", str(repository / graph), "--format", "text"])
    picture = capsys.readouterr().out
    models = re.findall(r'model_name: "(\w+)"', (repository / graph).read_text())
    assert [] == [name for name in models if name not in picture]
    assert 0 == weft.main(["explain", str(repository / graph)])
    assert capsys.readouterr().out


def test_every_file_is_of_use(repository: Path) -> None:
    """Each graph is whole, each model of the page is called by one, and each pipeline is in the table at the top."""
    called = " ".join((repository / graph).read_text() for graph in GRAPHS)
    models = {path.split("/")[1] for path, _ in files_of(TEXT) if not path.startswith("graphs/")}
    assert [] == [name for name in sorted(models) if f'model_name: "{name}"' not in called]
    headings = re.findall(r"(?m)^## (.*)$", TEXT)
    listed = re.findall(r"(?m)^\| \[.*?\]\(#(.*?)\) \|", TEXT)
    assert listed == [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("code", [text for path, text in files_of(TEXT) if path.endswith(".py")])
def test_a_model_compiles(code: str) -> None:
    """With the Python that runs it."""
    compile(code, "docs/cookbook.md", "exec")


@pytest.mark.parametrize("command", sorted({command.strip("$`& ") for command in COMMANDS}))
def test_a_command_is_taken(command: str) -> None:
    """Its flags and arguments exist."""
    assert weft.make_parser().parse_args(shlex.split(command)[1:]).run
