"""Cases in text files: a title that states a fact, what goes in, and lines of ``->`` that come out.

    # Lines before the first title are the file's own header; lines of ``#`` are comments.
    == a title
    @option its value
    line in
    -> line out

WEFT_UPDATE_GOLDEN=1 writes the lines of ``->`` anew.
"""

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Case:
    """One case; ``header`` is the text before the first of its file, whose options are those of each."""

    file: Path
    title: str
    header: str
    options: tuple[tuple[str, str], ...]
    body: str

    @property
    def text(self) -> str:
        """The lines that go in."""
        return "\n".join(line for line in self.body.split("\n") if not line.startswith("->"))

    def option(self, name: str, default: str = "") -> str:
        """The value of an option, of the last if it comes more than once."""
        return dict(self.options).get(name, default)

    def check(self, found: str) -> None:
        """Assert that these lines come out of all that goes in."""
        self._check([*(self.text.split("\n") if self.text else ()), *_out(found.split("\n"))])

    def check_script(self, run: Callable[[str], Iterable[str]]) -> None:
        """Assert that each line that goes in has the lines behind it that ``run`` says come out of it."""
        self._check([each for line in self.text.split("\n") for each in (line, *_out(run(line)))])

    def _check(self, lines: list[str]) -> None:
        found = "\n".join(lines)
        if os.environ.get("WEFT_UPDATE_GOLDEN") and found != self.body:
            before, title, rest = self.file.read_text().partition(f"== {self.title}\n")
            own, following, others = rest.partition("\n== ")
            kept = [line for line in own.split("\n") if line.startswith(("@", "#"))]
            self.file.write_text(before + title + "\n".join([*kept, found]) + "\n" + following + others)
        else:
            assert self.body == found


def cases(*files: Path) -> pytest.MarkDecorator:
    """Runs a test with each case of the files as ``case``; ids are the titles."""
    found = [case for file in files for case in _read(file)]
    assert len({(case.file, case.title) for case in found}) == len(found), "a title stands twice"
    return pytest.mark.parametrize("case", found, ids=[f"{case.file.stem}: {case.title}" for case in found])


def literals(text: str) -> dict[str, Any]:
    """``a=1 b=x`` as a dict; what is no literal is a string."""
    return {name: literal(value) for name, _, value in (each.partition("=") for each in text.split())}


def literal(text: str) -> Any:
    """The value of a literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _out(lines: Iterable[str]) -> list[str]:
    return [f"-> {line}".rstrip() for line in lines]


def _read(file: Path) -> Iterator[Case]:
    header, *parts = ("\n" + file.read_text()).split("\n== ")
    shared = [line for line in header.strip("\n").split("\n") if not line.startswith("#")]
    text = "\n".join(line for line in shared if not line.startswith("@"))
    for part in parts:
        title, *lines = part.strip("\n").split("\n")
        given = [line[1:].partition(" ") for line in (*shared, *lines) if line.startswith("@")]
        options = tuple((name, value) for name, _, value in given)
        yield Case(file, title, text, options, "\n".join(line for line in lines if not line.startswith(("@", "#"))))
