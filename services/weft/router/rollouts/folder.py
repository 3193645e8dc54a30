"""Shared state of rollouts in a folder: for workers, and for routers on one machine or one file system."""

import contextlib
import fcntl
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from weft.base.observing.logs import get_logger
from weft.base.processes.owned_folder import owned_folder
from weft.jobs.atomic_files import replace_file
from weft.router.rollouts.shared import Document, Json, Ownership

STATE, OWNER = "state.json", "owner.json"
_MAX_WAIT_S = 5.0

_log = get_logger("weft.router.rollouts")


class FolderState:
    """A file that members change under a lock, and one with the owner's name and last renewal.

    Nothing is made before there is something to keep. A damaged file is renamed to end in ``.damaged``.

    Args:
        folder: Of all members; None: a temporary one of this process.
    """

    def __init__(self, folder: Path | None, ownership: Ownership, *, period_s: float = 0.5) -> None:
        self.member, self.period_s = ownership.member, period_s
        self._stack, self._folder, self._ownership = ExitStack(), folder, ownership

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the file, alone among all members."""
        if (self._folder is None or not (self._folder / STATE).exists()) and not edit(document := Document()):
            return document
        path = self._made() / STATE
        with path.with_suffix(".lock").open("a") as lock:  # NFS locks what is open for writing
            self._wait_for(lock)
            document = self._read(path)
            document.owner = _changed(path.with_name(OWNER), self._ownership.hold)
            if edit(document):
                replace_file(path, document.text.encode())
        return document

    def close(self) -> None:
        """Free ownership; without the lock, which a member that hangs may hold: at worst another one gets it."""
        with self._stack, contextlib.suppress(OSError):
            if self._folder is not None:
                _changed(self._folder / OWNER, self._ownership.release)

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


def _changed(path: Path, change: Callable[[Json], bool]) -> str:
    """Hold or release the ownership that a file keeps; the name of the owner."""
    try:
        spec = dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # of a member that was killed while it wrote, too
        spec = {}
    if change(spec):
        path.write_text(json.dumps(spec))
    return str(spec.get("holderIdentity", ""))
