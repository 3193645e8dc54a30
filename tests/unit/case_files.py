"""Cases of text files: what is given and what is expected, as each file says at its top.

A block is ``=== title``, what is given, ``---``, what is expected; in a file of lines a case is a line and the indented
lines behind it, and lines that begin with # are remarks. WEFT_UPDATE_GOLDEN=1 writes what is found into the files.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet


class Case(NamedTuple):
    """One case; ``head`` is all of it but what is expected, which ``margin`` is in front of."""

    file: Path
    head: str
    given: str
    expected: str
    margin: str = ""

    def check(self, found: str) -> None:
        """Found is what is expected, or is written down as such."""
        if os.environ.get("WEFT_UPDATE_GOLDEN"):
            old, new = (self.head + indent(text + "\n" * bool(text), self.margin) for text in (self.expected, found))
            self.file.write_text(self.file.read_text().replace(old, new))
        else:
            assert self.expected == found


def cases(files: Iterable[Path]) -> list[ParameterSet]:
    """The blocks of these files, as parameters of a test; a title is a name and, after a colon, the fact."""
    params = []
    for file in sorted(files):
        for block in re.split(r"^=== ", file.read_text(), flags=re.MULTILINE)[1:]:
            head, _, expected = block.partition("\n---\n")
            title, _, given = head.partition("\n")
            case = Case(file, f"=== {head}\n---\n", given, expected.rstrip("\n"))
            params.append(pytest.param(case, id=f"{file.stem}-{title.partition(':')[0]}"))
    return params


def line_cases(file: Path) -> list[ParameterSet]:
    """The cases of a file of lines."""
    params = []
    for given, expected in re.findall(r"^(?! |#)(.+)\n((?:    .*\n)*)", file.read_text(), flags=re.MULTILINE):
        case = Case(file, f"\n{given}\n", given, re.sub(r"^    ", "", expected, flags=re.MULTILINE)[:-1], "    ")
        params.append(pytest.param(case, id=given))
    return params
