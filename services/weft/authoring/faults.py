"""Errors on the user's line: with the compiler's code, what is wrong, and the cure."""

import linecache
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from weft.base.text.pbtxt import Diagnostic
from weft.language.syntax.file import GraphError

_OWN = str(Path(__file__).parent)


class Place(NamedTuple):
    """A line of the user's Python."""

    file: str
    line: int


class GraphAttributeError(GraphError, AttributeError):
    """A name behind a dot that a model, a step or an expression does not have."""


GraphError.__module__ = GraphAttributeError.__module__ = "weft"  # as users import it


def here() -> Place:
    """The line outside of this package that is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def diagnostic(code: str, message: str, place: Place, severity: str = "error") -> Diagnostic:
    """A finding on a line of Python."""
    text = linecache.getline(*place).rstrip("\n")
    return Diagnostic(place.file, place.line, len(text) - len(text.lstrip()) + 1, message, code, severity, text)


def fault(code: str, message: str, place: Place | None = None, kind: type[GraphError] = GraphError) -> GraphError:
    """The error to raise for one finding; by default on the line that is being executed."""
    return kind([diagnostic(code, message, place or here())])


def lacks(message: str, code: str = "G006") -> GraphError:
    """The error to raise for an unknown name behind a dot."""
    return fault(code, message, kind=GraphAttributeError)


def raise_at_place(error: GraphError, function: str) -> NoReturn:
    """Raise an error with a traceback that ends on the user's line that its first finding is about."""
    found = error.diagnostics[0]
    if _end_at_user(error.__traceback__) == (found.file, found.line):
        raise error.with_traceback(error.__traceback__)
    error.__traceback__ = None
    code = compile("\n" * (found.line - 1) + "raise error", found.file, "exec").replace(co_name=function)
    exec(code, {"error": error})  # noqa: S102  # the text is above
    raise AssertionError


def _end_at_user(traceback: TracebackType | None) -> Place | None:
    """Take this package's frames off the end of a traceback; returns the line of Python where it ends then."""
    last = None
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OWN):
            last = traceback
        traceback = traceback.tb_next
    if last is None:
        return None
    last.tb_next = None
    return Place(last.tb_frame.f_code.co_filename, last.tb_lineno)
