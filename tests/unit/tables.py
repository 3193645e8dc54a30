"""Cases in text files beside the tests that run them; the comment at the top of a file says what they are.

A table has a row a line, ``what -> words``, under headings ``[kind]``. A script has cases of several lines, each under
its title, ``== title``. Blank lines and lines that begin with ``#`` mean nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet


def table(path: Path, kind: str | None = None) -> list[ParameterSet]:
    """Parameters ``kind, what, words`` of each row, or ``what, words`` of the rows of one kind."""
    heading, found = "", []
    for line in _lines(path):
        if line.startswith("[") and line.endswith("]") and " -> " not in line:
            heading = line[1:-1]
            continue
        what, _, words = line.partition(" -> ")
        assert words, f"{path}: no ' -> ' in {line!r}"
        if kind is None:
            found.append(pytest.param(heading, what.strip(), words.strip(), id=f"{heading}: {words.strip()}"))
        elif kind == heading:
            found.append(pytest.param(what.strip(), words.strip(), id=words.strip()))
    assert found, f"{path} has no rows of {kind}"
    return found


def scripts(path: Path) -> list[ParameterSet]:
    """The lines of each case, by its title."""
    cases: dict[str, list[str]] = {}
    for line in _lines(path):
        if line.startswith("== "):
            assert line not in cases, line
            cases[line] = lines = []
        else:
            lines.append(line)
    return [pytest.param(lines, id=title.removeprefix("== ")) for title, lines in cases.items()]


def says(words: str, message: str) -> bool:
    """Whether ``message`` has ``words``, in which ``...`` stands for anything."""
    return re.search(".*".join(map(re.escape, words.split("..."))), message, re.DOTALL) is not None


def _lines(path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
