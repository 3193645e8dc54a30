"""Files and commands of docs/cookbook.md and docs/triton.md are right as they stand; requests: tests/integration."""

import re
import shlex
from pathlib import Path

import pytest
from examples.cookbook import PAGE, files_of, write_repository

from weft.cli import __main__ as weft

TEXT = PAGE.read_text()
TRITON = PAGE.with_name("triton.md")
TEXTS = {PAGE: TEXT, TRITON: TRITON.read_text()}
GRAPHS = [
    (page, path)
    for page in TEXTS
    for path, _ in sorted(files_of(TEXTS[page]))
    if path.startswith("graphs/") and path.endswith(".pbtxt")
]
COMMANDS = re.findall(r"(?m)^\$ (?:weft .*)|`(?:weft \w+ .*)`", "".join(TEXTS.values()))


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Path:
    """The page of a repository."""
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Path:
    """The repository of the page."""
    return write_repository(tmp_path_factory.mktemp(page.stem), TEXTS[page])


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem, indirect=True)
def test_every_graph_passes_the_check(repository: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a warning, over the models of the page and the samples."""
    graphs = [str(repository / graph) for of, graph in GRAPHS if of == page]
    assert (0, "") == (weft.main(["check", *graphs]), capsys.readouterr().out)


@pytest.mark.parametrize(("page", "graph"), GRAPHS, ids=[graph for _, graph in GRAPHS], indirect=["page"])
def test_a_graph_is_drawn_and_explained(graph: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every model that the file calls is in the picture; the way of a request is told without a server."""
    assert 0 == weft.main(["draw", str(repository / graph), "--format", "text"])
    picture = capsys.readouterr().out
    models = re.findall(r'model_name: "(\w+)"', (repository / graph).read_text())
    assert [] == [name for name in models if name not in picture]
    assert 0 == weft.main(["explain", str(repository / graph)])
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_every_file_is_of_use(page: Path) -> None:
    """Each graph is whole, each model of the page is called by one, and each pipeline is in the table at the top."""
    text = TEXTS[page]
    called = " ".join(content for path, content in files_of(text) if path.startswith("graphs/"))
    models = {path.split("/")[1] for path, _ in files_of(text) if not path.startswith("graphs/")}
    assert [] == [name for name in sorted(models) if f'model_name: "{name}"' not in called]
    level, section = ("###", text.split("\n## ")[1]) if page == TRITON else ("##", text)
    headings = re.findall(rf"(?m)^{level} (.*)$", section)
    listed = re.findall(r"(?m)^\| \[.*?\]\(#(.*?)\) \|", section)
    assert listed == [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    "code", [text for page in TEXTS.values() for path, text in files_of(page) if path.endswith(".py")]
)
def test_a_model_compiles(code: str) -> None:
    """With the Python that runs it."""
    compile(code, "docs/cookbook.md", "exec")


@pytest.mark.parametrize("command", sorted({command.strip("$`& ") for command in COMMANDS}))
def test_a_command_is_taken(command: str) -> None:
    """Its flags and arguments exist."""
    assert weft.make_parser().parse_args(shlex.split(command)[1:]).run
