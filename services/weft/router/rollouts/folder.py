"""Shared state of rollouts in a folder: for workers, and for routers on one machine or one file system."""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from weft.base.observing.logs import get_logger
from weft.base.processes.owned_folder import owned_folder
from weft.router.rollouts.shared import Document

STATE = "state.json"
_MAX_WAIT_S = 5.0

_log = get_logger("weft.router.rollouts")


class FolderState:
    """A file, and a lock that the owner holds: the kernel frees it when the owner ends, however it ends.

    Nothing is made before there is something to keep. A damaged file is renamed to end in ``.damaged``.

    Args:
        folder: Of all members; None: a temporary one of this process.
    """

    def __init__(self, folder: Path | None, member: str, *, period_s: float = 0.5) -> None:
        self.member, self.period_s = member, period_s
        self._stack, self._folder, self._is_owner = ExitStack(), folder, False

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the file, alone among all members."""
        if (self._folder is None or not (self._folder / STATE).exists()) and not edit(document := Document()):
            return document
        path = self._made() / STATE
        with path.with_suffix(".lock").open("a") as lock:  # NFS locks what is open for writing
            self._wait_for(lock)
            document = self._read(path)
            document.owner = self._owner(path.with_name("owner"))
            if edit(document):
                path.with_suffix(".new").write_text(document.text)
                path.with_suffix(".new").replace(path)
        return document

    def close(self) -> None:
        """Free the owner's lock."""
        self._is_owner = False
        self._stack.close()

    def _wait_for(self, lock: IO[str]) -> None:
        """Raises TimeoutError: a member that hangs holds it; this one must still be able to begin and to end."""
        until_s = time.monotonic() + _MAX_WAIT_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"{lock.name} is held by another process for {_MAX_WAIT_S:g} s") from None
                time.sleep(0.005)

    def _made(self) -> Path:
        if self._folder is None:
            _log.warning("rollouts are forgotten when this router ends; --rollouts says where they are kept")
            self._folder = self._stack.enter_context(owned_folder("weft-rollouts-"))
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n")  # it may be in a repository
        return self._folder

    def _owner(self, path: Path) -> str:
        if not self._is_owner:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return path.read_text()
                raise
            self._stack.callback(os.close, descriptor)
            self._is_owner = True
            path.write_text(self.member)
        return self.member

    @staticmethod
    def _read(path: Path) -> Document:
        try:
            return Document.parse(path.read_bytes())
        except FileNotFoundError:
            return Document()
        except ValueError as error:
            aside = path.replace(path.with_suffix(".damaged"))
            _log.error("%s is damaged and is kept as %s: %s", path, aside.name, error)
            return Document()
