"""Texts that are on every machine with Python: the documentation that ships with it, split once and for all."""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Packages that an installation may lack, that are no prose, or that are not the standard library's own.
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test"})
_TOPICS = "topics.py"
_FEWEST_CHARS = 80  # shorter docstrings are labels rather than texts
_ONE_HELD_OUT_OF = 20


class Corpus(NamedTuple):
    """Texts, no two of them alike."""

    training: list[str]
    held_out: list[str]


def python_documentation() -> Corpus:
    """The docstrings of the standard library and the topics of ``help()``; about 2 MB of English and a little code.

    A text is held out by its own hash, so that it is on the same side with every release of Python that has it.
    """
    corpus = Corpus([], [])
    for text in dict.fromkeys(_texts(Path(sysconfig.get_path("stdlib")))):
        digest = hashlib.sha256(text.encode()).digest()
        (corpus.training if digest[0] % _ONE_HELD_OUT_OF else corpus.held_out).append(text)
    return corpus


def _texts(library: Path) -> Iterator[str]:
    """In the order of the files' names; nothing is imported or run."""
    for path in sorted(library.rglob("*.py")):
        if not _LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # samples of what a parser must refuse
            continue
        texts = _strings(tree) if path.name == _TOPICS else _docstrings(tree)
        yield from (text for text in texts if len(text) >= _FEWEST_CHARS)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.strip()
