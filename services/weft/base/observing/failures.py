"""Failures of user code: logged once with a traceback that begins in it, and told to clients as far as allowed."""

import site
import traceback
from pathlib import Path
from typing import TypeVar

from weft.base.errors import WeftError

FailureT = TypeVar("FailureT", bound=WeftError)

#: Longest traceback that goes to another process or a client, in characters; its end is kept.
MAX_TRACEBACK_CHARACTERS = 3000
#: Code that is not the user's: Weft, the interpreter's import system, what is installed.
_LIBRARIES = (str(Path(__file__).parents[2]), "<frozen", str(Path(traceback.__file__).parent), *site.getsitepackages())

#: What the import of a model leaves in its tracebacks.
_IMPORTING = ("<frozen importlib._bootstrap>", str(Path("serving", "backends", "python", "loader.py")))


class Disclosure:
    """Whether clients get the tracebacks of models: set by ``--dev``, of the whole process."""

    is_on = False


def traceback_of(error: BaseException) -> str:
    """The traceback of an error and its causes, each from the first frame of user code on, if there is one."""
    formatted = seen = traceback.TracebackException.from_exception(error)
    while seen is not None:
        own = next((i for i, frame in enumerate(seen.stack) if not frame.filename.startswith(_LIBRARIES)), 0)
        seen.stack[:] = [frame for frame in seen.stack[own:] if not frame.filename.endswith(_IMPORTING)]
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]  # mypy takes the first for never None
    return "".join(formatted.format()).rstrip("\n")


def caused_by(failure: FailureT, cause: BaseException) -> FailureT:
    """The failure with the traceback of its cause."""
    text = traceback_of(cause)
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        text = f"...{text[3 - MAX_TRACEBACK_CHARACTERS :]}"
    failure.traceback = text
    return failure


def disclose(failure: FailureT, cause: BaseException) -> FailureT:
    """As ``caused_by`` where clients get tracebacks; else the failure as it is."""
    return caused_by(failure, cause) if Disclosure.is_on else failure
