"""Cases in text files beside the tests that run them. Remarks at the top of a file say what its lines mean.

A block is a case: its title, options, what goes in and, behind ``->``, what comes out. In a script each line that goes
in has behind it what comes out of it. Lines before the first title belong to every case; lines of ``#`` are remarks::

    # What this file is about.
    == a title, which states the fact
    @option its value
    a line that goes in
    -> a line that comes out

A table is for short cases: rows ``what -> words`` under headings ``[kind]``.

WEFT_UPDATE_GOLDEN=1 makes the tests write what comes out into the files of blocks; look at the difference then.
"""

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet


@dataclass(frozen=True)
class Case:
    """One case; ``header`` is the text before the first of its file, whose options are those of each."""

    file: Path
    title: str
    header: str
    options: tuple[tuple[str, str], ...]
    body: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The lines that go in."""
        return [line for line in self.body if not line.startswith("->")]

    @property
    def text(self) -> str:
        """The lines that go in, as one text."""
        return "\n".join(self.lines)

    @property
    def script(self) -> list[tuple[str, list[str]]]:
        """Each line that goes in, with those that come out of it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.body:
            if line.startswith("->"):
                found[-1][1].append(line.removeprefix("->").removeprefix(" "))
            else:
                found.append((line, []))
        return found

    def option(self, name: str, default: str = "") -> str:
        """The value of an option, of the last if it comes more than once."""
        return dict(self.options).get(name, default)

    def check(self, found: str) -> None:
        """Assert that these lines come out of all that goes in."""
        self._check([*self.lines, *_out(found.split("\n"))])

    def check_script(self, run: Callable[[str], Iterable[str]]) -> None:
        """Assert that each line that goes in has the lines behind it that ``run`` says come out of it."""
        self._check([each for line in self.lines for each in (line, *_out(run(line)))])

    def _check(self, found: list[str]) -> None:
        if os.environ.get("WEFT_UPDATE_GOLDEN") and found != list(self.body):
            blocks = re.split(r"^(?=== )", self.file.read_text(), flags=re.MULTILINE)
            (index,) = (index for index, block in enumerate(blocks) if block.startswith(f"== {self.title}\n"))
            block, remarks = re.fullmatch(r"(.*?\n)((?:(?:#.*)?\n)*)", blocks[index], re.DOTALL).groups()  # type: ignore[union-attr]
            kept = [line for line in block.split("\n") if line.startswith(("== ", "@", "#"))]
            blocks[index] = "\n".join([*kept, *found]) + "\n" + remarks
            self.file.write_text("".join(blocks))
        else:
            assert list(self.body) == found


def cases(*files: Path) -> pytest.MarkDecorator:
    """Runs a test with each case of the files as ``case``; ids are the titles."""
    found = [case for file in sorted(files) for case in _read(file)]
    assert len({(case.file, case.title) for case in found}) == len(found), "a title stands twice"
    return pytest.mark.parametrize("case", found, ids=[f"{case.file.stem}: {case.title}" for case in found])


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Title and lines of each block, first those without a title; no remarks, and no empty lines at either end."""
    lines = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
    parts = [part.strip("\n").split("\n") for part in re.split(r"^== ", f"\n{lines}", flags=re.MULTILINE)]
    return [("", parts[0]), *((title, rest) for title, *rest in parts[1:])]


def _read(file: Path) -> Iterator[Case]:
    (_, header), *parts = blocks(file.read_text(encoding="utf-8"))
    text = "\n".join(line for line in header if not line.startswith("@"))
    for title, lines in parts:
        options = (line[1:].partition(" ") for line in (*header, *lines) if line.startswith("@"))
        body = tuple(line for line in lines if not line.startswith("@"))
        yield Case(file, title, text, tuple((name, value) for name, _, value in options), body)


def table(file: Path, kind: str | None = None) -> list[ParameterSet]:
    """Parameters ``kind, what, words`` of each row, or ``what, words`` of the rows of one kind."""
    heading, found = "", []
    for line in filter(None, map(str.strip, blocks(file.read_text(encoding="utf-8"))[0][1])):
        if line.startswith("[") and line.endswith("]") and " -> " not in line:
            heading = line[1:-1]
            continue
        what, _, words = (part.strip() for part in line.partition(" -> "))
        assert words, f"{file}: no ' -> ' in {line!r}"
        if kind is None:
            found.append(pytest.param(heading, what, words, id=f"{heading}: {words}"))
        elif kind == heading:
            found.append(pytest.param(what, words, id=words))
    assert found, f"{file} has no rows of {kind}"
    return found


def says(words: str, message: str) -> bool:
    """Whether ``message`` has ``words``, in which ``...`` stands for anything."""
    return re.search(".*".join(map(re.escape, words.split("..."))), message, re.DOTALL) is not None


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
