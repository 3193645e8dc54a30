"""Writes files of docs/cookbook.md or another page as a repository: ``python examples/cookbook.py DIR [PAGE]``.

A block of the page whose first line is a comment with a path, ``# graphs/vote/1/graph.pbtxt``, is that file; of
``# model/{a,b}/1/model.py`` there are two. Sample models and graphs that the page names are linked, not copied.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/cookbook.md"
SAMPLES = ROOT / "model_repository"
_FILE = re.compile(r"^```\w+\n# ([\w./{},]+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r'"(\w+)"')


def files_of(page: str) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the page."""
    for path, text in _FILE.findall(page):
        before, brace, rest = path.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(",") if brace else [""]:
            yield before + name + after, text


def write_repository(root: Path, page: str, samples: Path = SAMPLES) -> Path:
    """Write the files of the page below ``root``, and link the samples that they name beside them; returns ``root``.

    Raises:
        OSError: A file cannot be written.
    """
    for path, text in files_of(page):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        if path.endswith("config.pbtxt"):
            (root / path).with_name("1").mkdir(exist_ok=True)  # the version may have no files
    _link(set(_NAME.findall(page)), root, samples)
    return root


def _link(names: set[str], root: Path, samples: Path) -> None:
    """Link the samples of these names, and what their graphs call."""
    for sample in samples.glob("*/*/"):
        link = root / sample.parent.name / sample.name
        if sample.name in names and not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(sample, target_is_directory=True)
            for graph in sample.glob("*/graph.pbtxt"):
                _link(set(_NAME.findall(graph.read_text())), root, samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of the repository; made if it is not there")
    parser.add_argument("page", type=Path, nargs="?", metavar="PAGE", default=PAGE, help="default: docs/cookbook.md")
    options = parser.parse_args()
    write_repository(options.dir, options.page.read_text())
