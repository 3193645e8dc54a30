"""Starts the processes of models, also in an environment of the model's own.

The parameter ``EXECUTION_ENV_PATH`` names it: a folder, or an archive of one. The process is started with its
interpreter, and finds Weft, and what else the environment lacks, behind its packages.
"""

import atexit
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.serving.backends.python.pipe import FrameReader, MemoryFile, Message, OutOfStepError, framed, unpack_error

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
    process, connection = start_process(interpreter, MemoryFile(), MemoryFile())
    limit = threading.Timer(COMPLETE_LIMIT_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        connection.sendall(framed(((), None, "complete", config, str(path))))
        reader = FrameReader(connection)
        replies: list[Message] = []
        while len(replies) < 2:  # the first one is the greeting
            replies += reader.read()
    except (EOFError, OSError, OutOfStepError):
        how = describe_exit(process.wait())
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


def start_process(
    interpreter: Interpreter, ours: MemoryFile, theirs: MemoryFile
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """A process, and this end of the pipe to it; the files are those of the large tensors that go there, and come."""
    mine, its = socket.socketpair()
    with its:
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        descriptors = its.fileno(), ours.descriptor, theirs.descriptor
        command, variables = interpreter
        process = subprocess.Popen(  # noqa: S603  # our own module
            [*command, *map(str, descriptors), level],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=descriptors,
            env=variables,
        )
    return process, mine


def describe_exit(status: int) -> str:
    """How a process ended with a status of ``subprocess``."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
