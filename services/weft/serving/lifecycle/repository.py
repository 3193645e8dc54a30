"""Model repositories on disk, and the loads and unloads that models ask for.

::

    <repository>/<model>/config.pbtxt       optional if the model's files say enough
    <repository>/<model>/<version>/...      version: an integer of at least 1
"""

import hashlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.repository.layout import (
    BYTECODE_FOLDER,
    CONFIG_FILENAME,
    has_files,
    is_version,
    model_names,
    names_backend,
)

_UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]")
_PIECE_BYTES = 1 << 16
#: Pieces of a file that are read; a longer one is read in as many, at equal distances, the first and last among them.
_NUM_PIECES = 64

#: Every file below a model's folder, with what changes when the file does: size, time, inode.
Fingerprint = tuple[tuple[str, int, int, int], ...]


class ModelRepository:
    """Read-only view of a folder of models. Every method reads the disk and blocks: keep it off the event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._named: set[str] = set()  # models whose configuration has named a backend

    def names(self) -> list[str]:
        """Names of the models, sorted; without hidden folders and ensembles, which a router serves."""
        return model_names(self.root)

    def directory(self, name: str) -> Path:
        """Folder of a model. Raises InvalidArgumentError for an invalid name, or NotFoundError."""
        check_name(name)
        directory = self.root / name
        if not directory.is_dir():
            raise NotFoundError(f"the repository has no folder '{name}'")
        return directory

    def versions(self, name: str) -> list[int]:
        """Numbers of the version folders of a model, sorted; other entries are skipped."""
        return sorted(
            int(entry.name) for entry in self.directory(name).iterdir() if is_version(entry.name) and entry.is_dir()
        )

    def fingerprints(self, known: Mapping[str, Fingerprint] | None = None) -> dict[str, Fingerprint]:
        """Current fingerprint of each model; files that vanish meanwhile are ignored.

        A model whose configuration named a backend, platform or model file before, and names none now, is being edited:
        its entry of ``known`` is kept. Raises OSError.
        """
        found: dict[str, Fingerprint] = {}
        for name in self.names():
            if not self._is_unfinished(name):
                found[name] = _fingerprint(self.root / name)
            elif known and name in known:
                found[name] = known[name]
        return found

    def _is_unfinished(self, name: str) -> bool:
        config = self.root / name / CONFIG_FILENAME
        try:
            is_named = names_backend(config)
        except OSError:
            return False  # there is none, or its faults are reported at load
        if is_named:
            self._named.add(name)
        return not is_named and (name in self._named or not has_files(config.parent))


def _fingerprint(directory: Path) -> Fingerprint:
    files: list[tuple[str, int, int, int]] = []
    for path in directory.rglob("*"):
        if BYTECODE_FOLDER in path.parts:  # written when a model.py is imported
            continue
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            files.append((str(path), found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(sorted(files))


def check_name(name: str) -> None:
    """Raise InvalidArgumentError unless ``name`` can name a folder directly in the repository."""
    if not name or name.startswith(".") or len(name.encode()) > 255 or _UNSAFE.search(name):
        raise InvalidArgumentError(
            f"Invalid model name {name[:80]!r}: a name is one path component of 1 to 255 bytes, without '/', '\\' or "
            "control characters, and does not start with '.'"
        )


def version_digest(folder: Path) -> str:
    """sha256 over names, sizes and contents of a version's files, hidden ones excluded.

    Of a larger file, 4 MiB of samples over its whole length are read: different weights differ nearly everywhere, and a
    full digest would take as long as loading. Blocks: reads the disk. Unreadable files count by name.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if BYTECODE_FOLDER in parts or any(part.startswith(".") for part in parts):
            continue
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                continue
            name = "/".join(parts).encode("utf-8", "surrogateescape")
            digest.update(f"{len(name)} {found.st_size} ".encode() + name)
            with path.open("rb") as file:
                for start in _starts(found.st_size):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
        except OSError:  # gone meanwhile, or not for this process: its backend says what is wrong, if anything
            continue
    return digest.hexdigest()


def _starts(num_bytes: int) -> list[int]:
    if num_bytes <= _NUM_PIECES * _PIECE_BYTES:
        return list(range(0, num_bytes, _PIECE_BYTES))
    last = num_bytes - _PIECE_BYTES
    return [last * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)]
