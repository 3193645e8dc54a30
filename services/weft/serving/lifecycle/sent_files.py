"""Files that clients send with a load, in temporary folders until the versions of that load have stopped."""

import re
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError, UnsupportedError
from weft.base.processes.owned_folder import owned_folder, remove_left

_PREFIX = "file:"
#: One component of a path: no "." or "..", no separator of any system, nothing that a shell or a log shows otherwise.
_PART = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]{1,255}")
_MAX_FILES, _MAX_PARTS = 1024, 8
_FOLDER = "weft-load-"


class SentFolder:
    """The folder of one load: ``root/MODEL/...``; ``remove`` gives its bytes back, and blocks. Raises OSError."""

    def __init__(self, num_bytes: int, files: "SentFiles") -> None:
        self._held = ExitStack()
        self.root: Path = self._held.enter_context(owned_folder(_FOLDER))
        self._num_bytes = num_bytes
        self._files = files

    def remove(self) -> None:
        """Delete it; nothing may use it any more."""
        self._held.close()
        self._files.give_back(self._num_bytes)


class SentFiles:
    """Writes the files of loads, and removes what killed processes have left.

    Args:
        max_bytes: Of all folders together; 0: files with a load are refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        if max_bytes:
            remove_left(_FOLDER)

    def write(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> SentFolder | None:
        """Write what the parameters ``file:PATH`` of a load have; None without any. Blocks.

        Raises:
            UnsupportedError: Files are not allowed here.
            InvalidArgumentError: ``config`` is missing, a path leaves the folder, or a value is not bytes.
            ResourceExhaustedError: The files exceed ``max_bytes``.
            UnavailableError: They cannot be written.
        """
        files = {key.removeprefix(_PREFIX): value for key, value in parameters.items() if key.startswith(_PREFIX)}
        if not files:
            return None
        where = f"failed to load '{name}', failed to poll from model repository"
        if not self._max_bytes:
            raise UnsupportedError(
                f"{where}: files cannot be sent with a load here; put them into the repository, or start the service "
                "with --allow-load-files"
            )
        if "config" not in parameters:
            raise InvalidArgumentError(
                f"{where}: load parameter 'config' must be specified with files: the model's own folder is not used"
            )
        if len(files) > _MAX_FILES:
            raise InvalidArgumentError(f"{where}: {len(files)} files are sent, {_MAX_FILES} are allowed")
        num_bytes = 0
        for path, content in files.items():
            parts = path.split("/")
            if len(parts) > _MAX_PARTS or not all(map(_PART.fullmatch, parts)):
                raise InvalidArgumentError(
                    f"{where}: '{_PREFIX}{path[:80]}' must name a file within the model's folder, as "
                    f"'{_PREFIX}1/model.onnx': at most {_MAX_PARTS} parts, none of them empty, '.' or '..'"
                )
            if not isinstance(content, bytes):
                kind = type(content).__name__
                raise InvalidArgumentError(f"{where}: '{_PREFIX}{path}' must be bytes, the file's content, got {kind}")
            num_bytes += len(content)
        self._take(num_bytes, where)
        try:
            folder = SentFolder(num_bytes, self)
        except OSError as error:
            self.give_back(num_bytes)
            raise UnavailableError(f"{where}: no temporary folder can be made: {error.strerror}") from None
        try:
            for path, content in files.items():
                target = folder.root / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)  # type: ignore[arg-type]  # checked above
        except OSError as error:
            folder.remove()
            if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
                raise InvalidArgumentError(f"{where}: '{_PREFIX}{path}' is a file and a folder at once") from None
            raise UnavailableError(f"{where}: '{_PREFIX}{path}' cannot be written: {error.strerror}") from None
        return folder

    def give_back(self, num_bytes: int) -> None:
        """Note that so many bytes are deleted."""
        with self._lock:
            self._num_bytes -= num_bytes

    def _take(self, num_bytes: int, where: str) -> None:
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                kept = f", beside {self._num_bytes} of models that were loaded so" if self._num_bytes else ""
                raise ResourceExhaustedError(
                    f"{where}: its files have {num_bytes} bytes{kept}; {self._max_bytes} are allowed in all; unload "
                    "such models, or start the service with a larger --allow-load-files"
                )
            self._num_bytes += num_bytes
