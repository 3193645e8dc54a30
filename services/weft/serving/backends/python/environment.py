"""The Python environment of a model's own, by the parameter ``EXECUTION_ENV_PATH``: a folder, or an archive of one.

The process of the model is started with the interpreter of the environment, and finds Weft, and what else the
environment lacks, behind its packages.
"""

import atexit
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import zlib
from pathlib import Path

from weft.base.errors import InvalidArgumentError, UnavailableError

ENVIRONMENT = "EXECUTION_ENV_PATH"
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_MODULE = "weft.serving.backends.python.child"
_START = f"import sys; sys.path += sys.argv.pop(1).split({os.pathsep!r}); from {_MODULE} import main; main(sys.argv)"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

#: Folders of the archives that this process has unpacked, by path, time of change in nanoseconds, and size.
_unpacked: dict[tuple[Path, int, int], Path] = {}
_unpacking = threading.Lock()


def interpreter_of(given: str, folder: Path) -> tuple[list[str], dict[str, str] | None]:
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
    if _VERSION not in versions:
        found = f"Python {', '.join(versions)}" if versions else "no lib/python3.*"
        raise _fault(f"{path} has {found}, but this service is Python {_VERSION}: make it with the same one")
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
