"""Logs on standard error: for people on a terminal, else one JSON object per line; no caller blocks on the writing.

Printed text, for example by user models, warnings and uncaught exceptions become log lines too. Exception: what
libraries write to the file descriptor directly, such as gRPC's core; that is rare and meant for people.
"""

import atexit
import contextlib
import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO, cast
from weakref import WeakSet

from weft.base.observing.console import Console
from weft.base.observing.failures import traceback_of

#: Lines of one place and level a minute that are logged whole; the others are counted.
MAX_LINES = 100
#: The same for lines below a warning, of which a repository of many models causes some for each.
MAX_INFO_LINES = 1000
#: The same for lines with a traceback.
MAX_TRACEBACKS = 10
WINDOW_S = 60.0


@dataclass(slots=True)
class _Place:
    """Lines of one place since ``start_s``."""

    start_s: float
    last: logging.LogRecord | None = None
    num_lines: int = 0
    num_dropped: int = 0


class LogLimit:
    """Passes the first lines of each place in the code in a minute; reports then how many more there were.

    Not thread-safe: a ``logging.Handler`` calls it under its lock.

    Args:
        exempt: Loggers without a limit: what a program prints.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, exempt: frozenset[str] = frozenset()) -> None:
        self._clock_s = clock_s
        self._exempt = exempt
        self._windows: dict[tuple[str, int, int], _Place] = {}
        self._next_end_s = clock_s() + WINDOW_S

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether to log a record whole."""
        if record.name in self._exempt:
            return True
        place = (record.pathname, record.lineno, record.levelno)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = _Place(self._clock_s())
        window.num_lines += 1
        limit = MAX_LINES if record.levelno >= logging.WARNING else MAX_INFO_LINES
        if window.num_lines <= (MAX_TRACEBACKS if record.exc_info else limit):
            return True
        where = (record.levelno, record.pathname, record.lineno)
        window.last = logging.LogRecord(record.name, *where, record.getMessage(), (), None)  # not what the line holds
        window.num_dropped += 1
        return False

    def counts(self, *, is_end: bool = False) -> Iterator[tuple[logging.LogRecord, int]]:
        """For each place with suppressed lines, the last of them and their number; once a minute, and at the end."""
        now_s = self._clock_s()
        if now_s < self._next_end_s and not is_end:
            return
        self._next_end_s = now_s + WINDOW_S
        windows, self._windows = self._windows, {}
        for window in windows.values():
            if window.last:
                yield window.last, window.num_dropped


_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}

#: Limit of buffered lines, in bytes; further lines are dropped and counted.
MAX_WAITING_BYTES = 4 << 20
#: How long the process waits at exit for buffered lines to be written, in seconds.
FLUSH_S = 1.0
#: Longest printed line, in characters; longer ones are split.
_MAX_PRINTED = 1 << 16
#: Pause after a failed write, for example on a full disk, in seconds.
_PAUSE_S = 0.1
_DROPPED = "%d log lines were dropped: they could not be written"
#: Functions that tell fields of the request that the running thread or task works for: ``request_id``, ``trace_id``.
request_fields: list[Callable[[], Mapping[str, str]]] = []


#: Lines by Triton Inference Server's setting ``log_format`` ISO8601, and what they look like.
_PLAIN = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S%z")
_PLAIN_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\S+) (?P<pid>\d+) (?P<level>[A-Z]+) (?P<logger>\S+): (?P<message>.*)"
)
#: Loggers of what programs print, which is not limited.
_PRINTED = frozenset({"stdout", "stderr"})


class LineFormatter(logging.Formatter):
    """Formats a record as one JSON line, or for people; ``extra`` becomes fields (``error_id``, ``model``).

    Args:
        service: Name of the process in every line.
        fields: More of every line.
        console: The form for people; None: JSON.
    """

    def __init__(
        self, service: str = "", fields: Mapping[str, object] | None = None, console: Console | None = None
    ) -> None:
        super().__init__()
        self.service = service
        self.console = console
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line without line breaks; for people, a traceback follows it."""
        own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": own.get("service", self.service),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        for source in request_fields:
            line.update(source())
        line.update(own)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = traceback_of(record.exc_info[1])
        return self.text(line)

    def text(self, line: Mapping[str, object]) -> str:
        """The same of finished fields."""
        return json.dumps(line, default=str) if self.console is None else self.console.text(line)


class LineWriter:
    """Writes lines to a file descriptor on a thread; drops and counts lines that exceed the buffer.

    Args:
        fd: File descriptor; not closed.
        dropped: Makes the line that reports a number of dropped lines, once writing works again.

    Attributes:
        num_dropped: Dropped lines since the start.
    """

    def __init__(self, fd: int, dropped: Callable[[int], str], *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._max_waiting_bytes = max_waiting_bytes
        self._dropped = dropped
        self._num_reported = 0
        self.reset()
        self._start()
        _writers.add(self)

    def reset(self) -> None:
        """Clear the buffer; the next line starts a thread. Also called in a forked process, which has no thread."""
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._has_thread = False

    def write(self, line: str) -> None:
        """Buffer a line, or drop it; never blocks on the reader."""
        data = (line + "\n").encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > self._max_waiting_bytes:
                self.num_dropped += 1
                return
            self._waiting_bytes += len(data)
            self._lines.append(data)
            self._changed.notify_all()
            if not self._has_thread:
                self._start()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Whether all lines were written within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._is_writing), timeout_s)

    def _start(self) -> None:
        self._has_thread = True
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                data = self._lines.popleft()
                self._waiting_bytes -= len(data)
                self._is_writing = True
            is_written = self._write(data)
            with self._changed:
                if not is_written:
                    self.num_dropped += 1
                elif self.num_dropped > self._num_reported and not self._lines:
                    text = self._dropped(self.num_dropped - self._num_reported)
                    self._num_reported = self.num_dropped
                    self._lines.append(text.encode() + b"\n")
                    self._waiting_bytes += len(self._lines[-1])
                self._is_writing = False
                self._changed.notify_all()
            if not is_written:
                time.sleep(_PAUSE_S)  # lines are buffered in the meantime, and dropped beyond the limit

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BlockingIOError:  # the pipe was made non-blocking
            return False
        except OSError:  # a full disk, a closed reader
            return False
        return True


#: Writers whose lock a fork may have copied while it was held.
_writers: "WeakSet[LineWriter]" = WeakSet()


def _reset_writers() -> None:
    for writer in _writers:
        writer.reset()


os.register_at_fork(after_in_child=_reset_writers)


class _Handler(logging.Handler):
    """Passes every record to the writer."""

    def __init__(self, descriptor: int, formatter: LineFormatter) -> None:
        super().__init__()
        self.writer = LineWriter(descriptor, self._dropped)
        self.limit = LogLimit(exempt=_PRINTED)
        self.line_formatter = formatter
        self.setFormatter(formatter)

    def _dropped(self, num_lines: int) -> str:
        return self.format(logging.LogRecord("weft.logs", logging.WARNING, "", 0, _DROPPED, (num_lines,), None))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.tell_counts()
            if self.limit.admits(record):
                self.writer.write(self.format(record))
        except Exception as error:  # a record that cannot be formatted must not raise in its caller
            bad = logging.LogRecord(record.name, logging.ERROR, "", 0, f"bad record: {error!r}", None, None)
            self.writer.write(self.format(bad))

    def tell_counts(self, *, is_end: bool = False) -> None:
        """Write how many lines were left out, for each place that logged too many."""
        for record, num_lines in self.limit.counts(is_end=is_end):
            text = f"{num_lines} more lines like this one within a minute: {record.getMessage()}"
            told = logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, "%s", (text,), None)
            self.writer.write(self.format(told))


class LoggingStream(io.TextIOBase):
    """A text stream whose lines become log records."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._parts = threading.local()  # keeps lines of concurrent threads apart

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The file descriptor of standard error, for child processes."""
        return 2

    def write(self, text: str) -> int:
        """Log every complete line; the rest waits for its line break."""
        waiting = getattr(self._parts, "text", "") + text
        *lines, rest = waiting.split("\n")
        while len(rest) > _MAX_PRINTED:
            lines.append(rest[:_MAX_PRINTED])
            rest = rest[_MAX_PRINTED:]
        self._parts.text = rest
        for line in lines:
            if line.strip():
                self._logger.log(self._level, "%s", line)
        return len(text)


def configure(
    level: str = "info", service: str = "", fields: Mapping[str, object] | None = None, *, is_json: bool = False
) -> None:
    """Send all log records and printed text of this process to standard error: JSON lines unless that is a terminal.

    ``sys.__stdout__`` and ``sys.__stderr__`` are unchanged.

    Args:
        level: Lowest level that is logged.
        service: Name of the process in every line.
        fields: More of every line.
        is_json: JSON on a terminal too.
    """
    # Without a standard error, descriptor 2 may be any file.
    descriptor = os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else sys.__stderr__.fileno()
    console = None if is_json else Console.of(descriptor)
    handler = _Handler(descriptor, LineFormatter(service, fields, console))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.stdout = cast(TextIO, LoggingStream(get_logger("stdout"), logging.INFO))
    sys.stderr = cast(TextIO, LoggingStream(get_logger("stderr"), logging.WARNING))
    atexit.register(flush)


def settings() -> dict[str, Any]:
    """Arguments of ``configure`` for a child process whose lines are of this service too."""
    root = logging.getLogger()
    formatters = [handler.line_formatter for handler in root.handlers if isinstance(handler, _Handler)]
    formatter = formatters[0] if formatters else LineFormatter()
    level = logging.getLevelName(root.getEffectiveLevel()).lower()
    return {"level": level, "service": formatter.service, "is_json": formatter.console is None}


def use_plain_lines(*, is_plain: bool) -> None:
    """Log lines of plain text, which begin with the time as ISO 8601, or again those of ``configure``."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.setFormatter(_PLAIN if is_plain else handler.line_formatter)


def flush() -> None:
    """Wait until logged lines are written, for at most ``FLUSH_S``."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.tell_counts(is_end=True)
            handler.writer.flush()


def forward(line: str, service: str, pid: int) -> None:
    """Write a line that another process has logged to standard error; what is not JSON becomes a line of its own."""
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, _Handler):
            continue
        fields: dict[str, Any] | None = None
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(line)
        elif plain := _PLAIN_LINE.fullmatch(line):
            fields = {**plain.groupdict(), "level": plain["level"].lower(), "pid": int(plain["pid"][:18])}
        if fields is None:
            time_text = datetime.now(UTC).isoformat(timespec="milliseconds")
            fields = {"time": time_text, "level": "info", "logger": "output", "message": line}
        handler.writer.write(handler.line_formatter.text(fields | {"service": service, "pid": fields.get("pid", pid)}))


def num_dropped() -> int:
    """Number of dropped log lines of this process."""
    return sum(handler.writer.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, _Handler))


def get_logger(name: str) -> logging.Logger:
    """The logger of a component, for example ``weft.serving``."""
    return logging.getLogger(name)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    get_logger("weft.uncaught").critical("uncaught exception", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    thread = args.thread.name if args.thread is not None else ""
    get_logger("weft.uncaught").critical(
        "uncaught exception in a thread",
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        extra={"thread_name": thread},
    )
