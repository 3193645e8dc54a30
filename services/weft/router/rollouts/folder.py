"""Shared state of rollouts in a folder: for workers, and for routers on one machine or one file system."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.base.observing.logs import get_logger
from weft.base.processes.owned_folder import owned_folder
from weft.jobs.atomic_files import replace_file
from weft.router.rollouts.shared import Document, Json, parsed

STATE = "state.json"
_OWNER, _LOCK, _COUNTS = "owner.lock", "state.lock", "counts-"

_log = get_logger("weft.router.rollouts")


class FolderState:
    """A file with the document, one with the counts of each member, and a lock that the owner holds.

    The kernel frees the lock when the owner ends, however it ends. Nothing is made before there is a rollout.

    Args:
        folder: Of all members; None: a temporary one of this process alone.
    """

    def __init__(self, folder: Path | None, member: str, *, period_s: float = 0.5) -> None:
        self.member, self.period_s = member, period_s
        self._stack = ExitStack()
        self._given = folder
        self._held: int | None = None

    @property
    def _folder(self) -> Path:
        """The folder, made if need be; one within a repository is no part of its history."""
        if self._given is None:
            self._given = self._stack.enter_context(owned_folder("weft-rollouts-"))
        if not self._given.is_dir():
            self._given.mkdir(parents=True, exist_ok=True)
            (self._given / ".gitignore").write_text("*\n")
        return self._given

    def own(self) -> str:
        """Take the owner's lock if it is free."""
        path = self._folder / _OWNER
        if self._held is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return path.read_text()
            self._held = descriptor
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self.member.encode(), 0)
        return self.member

    def read(self) -> Document:
        """Like ``SharedState.read``; makes nothing."""
        if self._given is None:
            return Document()
        with contextlib.suppress(FileNotFoundError, ValueError):
            return Document(parsed((self._given / STATE).read_bytes()))
        return Document()

    def change(self, edit: Callable[[Document], bool]) -> Document:
        """Change the file under a lock; a damaged one is renamed to end in ``.damaged``."""
        with self._locked() as path:
            document = Document(owner=self.own())
            try:
                document.rollouts = parsed(path.read_bytes())
            except FileNotFoundError:
                pass
            except (ValueError, RecursionError) as error:
                aside = path.with_suffix(".damaged")
                path.replace(aside)
                _log.error("%s is damaged and is kept as %s: %s", path, aside.name, error)
            if edit(document):
                replace_file(path, document.text.encode())
        return document

    def tell(self, counts: Json) -> None:
        """Replace this member's file."""
        replace_file(self._folder / f"{_COUNTS}{self.member}.json", json.dumps(counts).encode())

    def counts(self) -> Mapping[str, Json]:
        """Every file of counts; one that a crash of the machine has damaged is left out."""
        found = {}
        for path in self._folder.glob(f"{_COUNTS}*.json"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[path.stem.removeprefix(_COUNTS)] = json.loads(path.read_bytes())
        return found

    def drop(self, members: Iterable[str]) -> None:
        """Remove their files."""
        for member in members:
            (self._folder / f"{_COUNTS}{member}.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Free the lock."""
        if self._held is not None:
            os.close(self._held)
        self._stack.close()

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        with (self._folder / _LOCK).open("a") as file:  # NFS locks what is open for writing
            fcntl.flock(file, fcntl.LOCK_EX)
            yield self._folder / STATE
