"""Every pipeline of docs/cookbook.md serves: each command of the page prints what the page shows."""

import re
import shlex
from collections.abc import Iterator

import pytest
from examples.cookbook import PAGE, ROOT, write_repository

from weft_cli.__main__ import main
from weft_mesh.running import running_mesh

#: Heading and commands of every pipeline, each command with the lines that the page shows of its output.
SESSIONS = [
    (section.partition("\n")[0], re.findall(r"^\$ (weft infer .*)\n((?:(?![$`]).*\n)*)", section, re.MULTILINE))
    for section in PAGE.read_text().split("\n## ")[1:]
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Router of a mesh over the page's repository, as `weft up` starts it."""
    root = write_repository(tmp_path_factory.mktemp("cookbook"), PAGE.read_text())
    with running_mesh(root) as endpoints:
        yield endpoints["router"].grpc


def pattern(lines: str) -> str:
    """Lines as a page shows them: ``...`` is anything, and lines between them may be left out."""
    return "(.*\n)*?".join(re.escape(line).replace(r"\.\.\.", ".*") + " *\n" for line in lines.splitlines())


@pytest.mark.parametrize(("heading", "commands"), SESSIONS, ids=[heading for heading, _ in SESSIONS])
def test_a_pipeline_answers_as_the_page_shows(
    url: str,
    heading: str,
    commands: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which a reader types the commands."""
    monkeypatch.chdir(ROOT)
    assert commands, f"'{heading}' shows no request"
    for command, shown in commands:
        status = main([*shlex.split(command)[1:], "--url", url])
        printed, faults = capsys.readouterr()
        assert 0 == status, f"{command}\n{faults}"
        assert shown, f"{command} prints\n{printed}"
        assert re.search(f"(?m)^{pattern(shown)}", printed), f"{command} prints\n{printed}"
