"""The example programs of ``tritonclient``, and with which arguments each is run: the lines of ``examples.txt``."""

import re
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).parent
IMAGE: Final = "{image}"
ALL: Final = tuple((HERE / "models.txt").read_text().split())


class Example(NamedTuple):
    """A program with arguments.

    Attributes:
        name: File name without ``.py``.
        models: What the repository has.
        http: Whether it calls the HTTP port; else gRPC.
        is_explicit: Whether it loads and unloads models, so that the mesh must allow it.
        has_url: Whether it takes ``--url``; else it calls 8000 or 8001.
        limit: What Weft does not do, so that the program fails where it asks for it; "": it must pass.
        fails_with: What it says then; whatever else it fails with is a failure.
        not_run: Why it is not run; "": it is.
    """

    name: str
    arguments: tuple[str, ...]
    models: tuple[str, ...]
    http: bool
    is_explicit: bool
    has_url: bool
    limit: str
    fails_with: str
    not_run: str


def _example(line: str) -> Example:
    name, protocol, arguments, notes = (cell.strip() for cell in line.split("|"))
    number = re.search(r"repository of (\d+) models", notes)
    limit = re.search(r"limit: (.*); fails with: (.*)", notes)
    says, fails_with = limit.groups() if limit else ("", "")
    return Example(
        name,
        tuple(arguments.split()),
        ALL[: int(number[1])] if number else ALL,
        protocol == "http",
        number is not None,
        "fixed ports" not in notes,
        says,
        fails_with,
        notes.partition("not run: ")[2],
    )


EXAMPLES: Final = tuple(
    _example(line) for line in (HERE / "examples.txt").read_text().splitlines() if not line.startswith("#")
)
