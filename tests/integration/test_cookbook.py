"""Every pipeline of docs/cookbook.md and docs/triton.md serves: its programs run, its commands print what is shown."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from examples.cookbook import PAGE, ROOT, write_repository

from weft.cli.__main__ import main
from weft.mesh.running import running_mesh

TRITON = ROOT / "docs/triton.md"
_ASKED = TRITON.read_text().partition("\n## The seven most asked graphs")[2].partition("\n## ")[0]
PIPELINES = [
    (page, *section.partition("\n")[::2])
    for page, sections in ((PAGE, PAGE.read_text().split("\n## ")), (TRITON, _ASKED.split("\n### ")))
    for section in sections[1:]
]
#: A program; or a command with the lines that the page shows of its output.
STEP = re.compile(
    r"^```python\n(?!# )(.*?)^```$|^\$ (weft infer [^\n]*)\n((?:(?![$`])[^\n]*\n)*)", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Gives the router of a mesh over a page's repository, as `weft up` starts it; one mesh for each page."""
    with ExitStack() as stack:

        @cache
        def start(page: Path) -> str:
            root = write_repository(tmp_path_factory.mktemp(page.stem), page.read_text())
            return stack.enter_context(running_mesh(root))["router"].grpc

        yield start


def pattern(lines: str) -> str:
    """Lines as a page shows them: ``...`` is anything, and lines between them may be left out."""
    return "(.*\n)*?".join(re.escape(line).replace(r"\.\.\.", ".*") + " *\n" for line in lines.splitlines())


@pytest.mark.parametrize(("page", "heading", "text"), PIPELINES, ids=[heading for _, heading, _ in PIPELINES])
def test_a_pipeline_answers_as_the_page_shows(
    url_of: Callable[[Path], str],
    page: Path,
    heading: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which a reader runs and types it, beside the sample models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_repository").symlink_to(ROOT / "model_repository", target_is_directory=True)
    steps = STEP.findall(text)
    assert any(command for _, command, _ in steps), f"'{heading}' shows no request"
    for program, command, shown in steps:
        if program:
            exec(compile(program, f"{page}: {heading}", "exec"), {})
            continue
        status = main([*shlex.split(command)[1:], "--url", url_of(page)])
        printed, faults = capsys.readouterr()
        assert shown, f"{command} prints\n{printed}{faults}"
        assert bool(re.search("(?m)^weft: ", shown)) == bool(status), f"{command}\n{faults}"
        assert re.search(f"(?m)^{pattern(shown)}", printed + faults), f"{command} prints\n{printed}{faults}"
