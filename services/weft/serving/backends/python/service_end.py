"""Starts a model's process, and the service's end of its pipe, which the event loop reads and writes itself."""

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.observing import logs, telemetry
from weft.base.observing.failures import Disclosure
from weft.base.processes.process import describe_exit
from weft.serving.backends.python.pipe import (
    Blocks,
    FrameReader,
    MemoryFile,
    Message,
    Outgoing,
    OutOfStepError,
    Pipe,
    framed,
    room,
    unpack_error,
)

ENVIRONMENT = "EXECUTION_ENV_PATH"
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_MODULE = "weft.serving.backends.python.child"
_START = f"import sys; sys.path += sys.argv.pop(1).split({os.pathsep!r}); from {_MODULE} import main; main(sys.argv)"
#: Of both ends: ``marshal`` and ``pickle`` then understand one another.
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

#: Time for ``auto_complete_config``, in seconds; more than the load waits for it.
COMPLETE_LIMIT_S = 200.0
_STDERR = 2  # standard output belongs to the service
#: The command of a process, and its environment variables; None: those of the service.
Interpreter = tuple[list[str], dict[str, str] | None]

#: Folders of the archives that this process has unpacked, by path, time of change in nanoseconds, and size.
_unpacked: dict[tuple[Path, int, int], Path] = {}
_unpacking = threading.Lock()


def interpreter_of(given: str, folder: Path) -> Interpreter:
    """The command that starts a process of the model in ``folder``, and its environment variables; None: ours.

    ``given`` is the parameter; "": the interpreter is this one. Unpacks an archive, once. Raises InvalidArgumentError
    for what is no environment of this version of Python.
    """
    if not given:
        return [sys.executable, "-P", "-m", _MODULE], None
    path = Path(given.replace(_MODEL_FOLDER, str(folder)))
    if not path.is_absolute():
        path = folder / path
    root = path if path.is_dir() else _unpack(path)
    versions = [entry.name.removeprefix("python") for entry in root.glob("lib/python3.*") if entry.is_dir()]
    if VERSION not in versions:
        found = f"Python {', '.join(versions)}" if versions else "no lib/python3.*"
        raise _fault(f"{path} has {found}, but this service is Python {VERSION}: make it with the same one")
    python = root / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise _fault(f"{path} has no bin/python that can be executed")
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    variables["PATH"] = os.pathsep.join([str(root / "bin"), variables.get("PATH", os.defpath)])
    return [str(python), "-P", "-c", _START, os.pathsep.join(filter(None, sys.path))], variables


def _fault(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"parameter '{ENVIRONMENT}': {text}")


def _unpack(path: Path) -> Path:
    try:
        status = path.stat()
    except OSError as error:
        raise _fault(f"{path} cannot be read: {error.strerror}") from None
    key = path, status.st_mtime_ns, status.st_size
    with _unpacking:
        if key not in _unpacked:
            folder = Path(tempfile.mkdtemp(prefix="weft-environment-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            try:
                with tarfile.open(path) as archive:
                    archive.extractall(folder, filter="tar")  # nothing leaves the folder
            except (tarfile.TarError, EOFError, zlib.error) as error:
                raise _fault(f"{path} is no archive of an environment: {error}") from None
            except OSError as error:
                raise UnavailableError(f"{path} cannot be unpacked: {error}") from None
            _unpacked[key] = folder
        return _unpacked[key]


def complete_in_process(config: dict[str, Any], path: Path, interpreter: Interpreter) -> dict[str, Any]:
    """As ``complete_config``, in a process of its own. Raises UnavailableError, too, if that ends or takes too long.

    Blocks its thread.
    """
    process, (connection, *_) = start_process(interpreter)
    limit = threading.Timer(COMPLETE_LIMIT_S, process.kill)
    limit.daemon, start_s = True, time.monotonic()
    limit.start()
    try:
        connection.sendall(framed(((), None, "complete", config, str(path))))
        reader = FrameReader(connection)
        replies: list[Message] = []
        while len(replies) < 2:  # the first one is the greeting
            replies += reader.read()
    except (EOFError, OSError, OutOfStepError):
        how = describe_exit(process.wait())
        if time.monotonic() - start_s >= COMPLETE_LIMIT_S:
            how = f"did not return within {COMPLETE_LIMIT_S:g} s, and was killed"
        name = config.get("name", "")
        raise UnavailableError(f"the process that ran auto_complete_config of model '{name}' {how}") from None
    finally:
        limit.cancel()
        connection.close()
        process.kill()
        process.wait()
    *_, error, completed = replies[1]
    if error is not None:
        raise unpack_error(error)
    return completed  # type: ignore[no-any-return]  # what the child has sent


def start_process(interpreter: Interpreter) -> "tuple[subprocess.Popen[bytes], Pipe]":
    """A process, and this end of the pipe to it."""
    mine, its = socket.socketpair()
    ours, theirs = MemoryFile(), MemoryFile()
    with its:
        settings = {**logs.settings(), "is_dev": Disclosure.is_on, "is_traced": telemetry.is_enabled()}
        descriptors = its.fileno(), ours.descriptor, theirs.descriptor
        command, variables = interpreter
        process = subprocess.Popen(  # noqa: S603  # our own module
            [*command, *map(str, descriptors), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=descriptors,
            env=variables,
        )
    return process, Pipe(mine, ours, theirs)


#: Tensors of one message that the event loop copies itself: 600 kB take it 0.03 ms. By another thread it is 0.1 ms, in
#: which that waits for the interpreter lock beside a busy loop: 32 requests at once took 1.6 ms of CPU each, not 1.0.
MAX_LOOP_BYTES = 1 << 20
_copier = ThreadPoolExecutor(2, "weft-python-copy")


class ServiceEnd:
    """One end of the pipe; every method is called on the running event loop.

    Messages leave, and arrive, in order: those behind one with large tensors wait until these are copied, on another
    thread. What the socket does not take waits until it does.

    Args:
        pipe: Its socket is closed with this.
        on_message: Called with each message, without ``freed`` and ``block``, and the contents of its block.
        on_end: Called once, after the last message, when the other end is gone; with the error that it sent nonsense,
            or that ``on_message`` raised, if it is for that.

    Attributes:
        gathers: Messages of one turn of the event loop leave together, at its end.
    """

    def __init__(
        self,
        pipe: Pipe,
        on_message: Callable[[Message, Any], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._connection, ours, self._theirs = pipe
        self._connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(self._connection)
        self._blocks = Blocks(ours)
        self._freed: list[int] = []
        self._on_message, self._on_end = on_message, on_end
        self._outbox: deque[tuple[Message, list[Any]]] = deque()  # behind one that is copied
        self._unsent: deque[memoryview] = deque()  # what the socket has not taken
        self._inbox: deque[Message | None] = deque()  # None: the end
        self._is_writing = self._is_reading = self._is_closed = False
        self._gathered: list[bytes] = []
        self.gathers = False
        self._loop.add_reader(self._connection, self._readable)

    def send(self, *message: Any, outgoing: Outgoing | None = None) -> None:
        """Send a message of builtins, and of the tensors that ``outgoing`` has packed.

        Raises ValueError for what cannot be sent. When the other end is gone, nothing happens.
        """
        large = outgoing.large if outgoing is not None else []
        if self._is_closed:
            return
        if self._is_writing:
            self._outbox.append((message, large))
        elif large:
            self._write_block(message, large)
        else:
            self._send_frame(message, None)

    def close(self) -> None:
        """Close this end; nothing is called any more. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._connection)
        if self._unsent:
            self._loop.remove_writer(self._connection)
            self._unsent.clear()
        self._outbox.clear()
        self._inbox.clear()
        self._connection.close()

    def _send_frame(self, message: Message, block: tuple[int, list[int]] | None) -> None:
        if self._is_closed:
            return
        frame = framed((self._freed, block, *message))
        self._freed = []
        if self.gathers or self._gathered:
            self._gathered.append(frame)
            if len(self._gathered) == 1:
                self._loop.call_soon(self._send_gathered)
        else:
            self._send_bytes(frame)

    def _send_gathered(self) -> None:
        frames, self._gathered = self._gathered, []
        if not self._is_closed:
            self._send_bytes(b"".join(frames))

    def _send_bytes(self, frame: bytes) -> None:
        sent = 0
        if not self._unsent:
            try:
                sent = self._connection.send(frame)
            except BlockingIOError:
                pass
            except OSError:  # the other end is gone, which is read too
                return
            if sent == len(frame):
                return
            self._loop.add_writer(self._connection, self._writable)
        self._unsent.append(memoryview(frame)[sent:])

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._connection)

    def _write_block(self, message: Message, large: list[Any]) -> None:
        sizes = [len(content) for content in large]
        num_bytes = room(sizes)
        offset = self._blocks.take(num_bytes)
        if num_bytes <= MAX_LOOP_BYTES:
            self._blocks.file.write(offset, large)
            self._send_frame(message, (offset, sizes))
            return
        self._is_writing = True
        self._copy(partial(self._blocks.file.write, offset, large), self._wrote_block, message, (offset, sizes))

    def _wrote_block(self, done: "Future[None]", message: Message, block: tuple[int, list[int]]) -> None:
        self._is_writing = False
        if error := done.exception():
            self._end(error)
            return
        self._send_frame(message, block)
        while self._outbox and not self._is_writing:
            following, large = self._outbox.popleft()
            if large:
                self._write_block(following, large)
            else:
                self._send_frame(following, None)

    def _readable(self) -> None:
        try:
            self._inbox.extend(self._reader.read())
        except BlockingIOError:
            return
        except OutOfStepError as error:
            self._end(error)
            return
        except (EOFError, OSError):
            self._loop.remove_reader(self._connection)
            self._inbox.append(None)
        if not self._is_reading:
            self._take()

    def _take(self) -> None:
        try:
            while self._inbox and not self._is_reading:
                message = self._inbox.popleft()
                if message is None:
                    self._end(None)
                    return
                freed, block, *rest = message
                for offset in freed:
                    self._blocks.give_back(offset)
                if block is None:
                    self._on_message(rest, ())
                else:
                    offset, sizes = block
                    if sum(sizes) <= MAX_LOOP_BYTES:
                        large = self._theirs.read(offset, sizes)
                        self._freed.append(offset)
                        self._on_message(rest, large)
                        continue
                    self._is_reading = True
                    self._copy(partial(self._theirs.read_aside, offset, sizes), self._read_block, rest, offset)
        except Exception as error:
            self._end(error)

    def _read_block(self, done: "Future[list[bytes]]", message: Message, offset: int) -> None:
        self._is_reading = False
        self._freed.append(offset)
        try:
            self._on_message(message, done.result())
        except Exception as error:
            self._end(error)
            return
        self._take()

    def _end(self, error: BaseException | None) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(error)

    def _copy(self, work: Callable[[], Any], then: Callable[..., None], *arguments: Any) -> None:
        def copied(done: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._if_open, then, done, *arguments)

        _copier.submit(work).add_done_callback(copied)

    def _if_open(self, then: Callable[..., None], *arguments: Any) -> None:
        if not self._is_closed:
            then(*arguments)
