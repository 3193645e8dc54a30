"""Every relative link of every page leads somewhere."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
IGNORED = {".venv", ".venv-tis", ".venv-peers", ".venv-clients", "node_modules", ".pytest_cache"}
PAGES = sorted(path for path in ROOT.rglob("*.md") if not IGNORED.intersection(path.relative_to(ROOT).parts))


def prose(page: Path) -> str:
    """A page without code blocks and code spans."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as links spell them."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    """The file or folder is there, and so is the heading that the link names."""
    dead = []
    for link in re.findall(r"\]\(\s*<?([^)\s>]+)>?", prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / unquote(place)).resolve() if place else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert [] == dead
