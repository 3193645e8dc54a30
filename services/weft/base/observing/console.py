"""Log lines for people: aligned and, on a terminal with colours, coloured; a traceback follows its line."""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Self

from weft.base.text.suggestion import printable

#: Columns of the service's name; longer names push the rest of their line.
_SERVICE_COLUMNS = 11
_RED, _YELLOW, _DIM, _BOLD = "31", "33", "2", "1"
_LEVELS = {"debug": _DIM, "info": _DIM, "warning": _YELLOW, "error": _RED, "critical": _RED}
#: Colours of services, in the order in which they log first.
_SERVICES = ("36", "35", "34", "32", "96", "95")
#: Loggers of printed text, whose level says nothing.
_PRINTED = frozenset({"stdout", "stderr", "output"})
#: Fields that people see in columns of their own, or not at all: they are for programs.
_SHOWN_OTHERWISE = frozenset(
    {
        "time", "level", "service", "pid", "logger", "message", "exception", "span_id", "wire", "num_frozen_objects",
    }
)  # fmt: skip


def has_colours() -> bool:
    """Whether the environment allows colours: NO_COLOR (https://no-color.org) is unset and the terminal is not dumb."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Console:
    """Formats log lines for people."""

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured
        self._services: dict[str, str] = {}

    @classmethod
    def of(cls, descriptor: int) -> Self | None:
        """For a file descriptor; None if that is no terminal."""
        return cls(is_coloured=has_colours()) if os.isatty(descriptor) else None

    def text(self, line: Mapping[str, object]) -> str:
        """The fields of a log line as text, without the last line break; each line begins with the service's name."""
        service, level = str(line.get("service", "")), str(line.get("level", "info"))
        message = str(line.get("message", ""))
        more = [
            f"{key}={value}"
            for key, value in line.items()
            if key not in _SHOWN_OTHERWISE and value not in ("", None) and not _has(message, str(value))
        ]
        first, *rest = printable(message).rstrip("\n").split("\n")
        colour = self._services.setdefault(service, _SERVICES[len(self._services) % len(_SERVICES)])
        name = self.styled(f"{service:<{_SERVICE_COLUMNS}}", colour) + " | "
        shown = "" if str(line.get("logger")) in _PRINTED else level.upper()
        begin = f"{_local_time(line)} {self.styled(f'{shown:<7}', _LEVELS.get(level, ''))} "
        fields = self.styled("  " + printable(" ".join(more)).replace("\n", "\\n"), _DIM) if more else ""
        if level in ("error", "critical"):
            first = self.styled(first, _BOLD)
        rest += printable(str(line.get("exception", ""))).splitlines()
        return "\n".join([f"{name}{begin}{first}{fields}", *(f"{name}  {other}" for other in rest)])

    def styled(self, text: str, style: str) -> str:
        """The text in a style: the numbers of an ANSI sequence."""
        return f"\x1b[{style}m{text}\x1b[0m" if self._is_coloured and style else text


def _has(message: str, value: str) -> bool:
    """Whether the message has a value as words of its own."""
    return value in message and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None


def _local_time(line: Mapping[str, object]) -> str:
    try:
        return datetime.fromisoformat(str(line.get("time"))).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return "        "
