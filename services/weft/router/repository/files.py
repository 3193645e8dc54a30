"""The graph files of a repository."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.base.observing.logs import get_logger
from weft.base.repository.layout import CONFIG_FILENAME, is_model, is_version, names_backend, versions_to_serve
from weft.base.text import pbtxt
from weft.language.syntax.file import GraphSource
from weft_protos import graph_pb2

_log = get_logger("weft.router.graphs")


@dataclass(frozen=True, slots=True)
class VersionFile:
    """One version of a graph.

    Attributes:
        path: ``<name>/<version>/graph.pbtxt``, or ``<name>/config.pbtxt`` of a Triton Inference Server ensemble.
        stamp: Time of the inode's last change in nanoseconds, size in bytes, inode: differs after each change of the
            file, also by a tool that restores its modification time.
    """

    name: str
    version: str
    path: Path
    stamp: tuple[int, int, int] = (0, 0, 0)

    def read(self) -> GraphSource:
        """The file's content for the compiler. Raises OSError."""
        return GraphSource(self.path.read_bytes(), str(self.path), self.name, self.version)


class GraphRepository:
    """Finds graph files under a folder; names from clients are compared with its entries, never joined to a path.

    Attributes:
        faults: Of the last scan: why a folder, or part of it, was skipped, by the folder's name.
        unreadable: Of the last scan: names of the folders that could not be read, in whole or in part.
    """

    def __init__(self, root: Path) -> None:
        self.faults: Mapping[str, str] = {}
        self.unreadable: frozenset[str] = frozenset()
        self._root = root

    def scan(self) -> dict[str, Sequence[VersionFile]]:
        """Find every graph with its versions to serve, lowest first.

        A folder without a graph file, or with a model's ``config.pbtxt``, is ignored. All versions with a
        ``graph.pbtxt`` are served, and of a Triton Inference Server ensemble those of its ``version_policy``. A folder
        that looks like a graph but is invalid is added to ``faults`` and logged once. Raises OSError: the repository
        cannot be read.
        """
        folders = [folder for folder in sorted(self._root.iterdir()) if not folder.name.startswith(".")]
        found = {folder.name: _contents(folder) for folder in folders}
        faults = {_shown(name): "; ".join(contents.faults) for name, contents in found.items() if contents.faults}
        for name, fault in faults.items():
            if self.faults.get(name) != fault:
                _log.warning("graph folder '%s': %s", name, fault)
        self.faults = faults
        self.unreadable = frozenset(name for name, contents in found.items() if not contents.is_readable)
        return {name: contents.files for name, contents in found.items() if contents.files}

    def find(self, name: str, version: str) -> GraphSource | None:
        """A graph for the compiler, which inlines it into graphs that name it; version "" means the latest."""
        if name.startswith(".") or name not in os.listdir(self._root):
            return None
        files = _contents(self._root / name).files
        chosen = [file for file in files if not version or file.version == version]
        return chosen[-1].read() if chosen else None

    def is_unfinished(self, name: str) -> bool:
        """Whether a folder has a ``config.pbtxt`` that names no backend, platform, model file or steps."""
        try:
            return not names_backend(self._root / name / CONFIG_FILENAME)
        except OSError:
            return False

    def names(self) -> list[str]:
        """Every graph name."""
        return list(self.scan())


@dataclass(slots=True)
class _Contents:
    files: list[VersionFile] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_readable: bool = True

    def leave_out(self, fault: str, *, is_readable: bool = True) -> None:
        self.faults.append(fault)
        self.is_readable &= is_readable


def _contents(folder: Path) -> _Contents:
    found = _Contents()
    if _shown(folder.name) != folder.name:
        found.leave_out("its name is not UTF-8")
        return found
    versions: list[str] = []
    try:
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            _look_at(entry, versions, found)
        if not found.files and (folder / "graph.pbtxt").exists():
            found.leave_out("graph.pbtxt must be in a version folder; move it into a folder '1'")
        versions.sort(key=int)
        found.files.sort(key=lambda file: int(file.version))
        config = folder / CONFIG_FILENAME
        if not found.files and config.is_file() and not is_model(config):
            if not versions:
                found.leave_out("it has no version folder; make an empty folder '1' beside config.pbtxt")
            found.files = [_file(folder.name, version, config) for version in _served_versions(config, versions)]
    except OSError as error:
        found.leave_out(f"it cannot be read: {error.strerror}", is_readable=False)
    return found


def _look_at(entry: Path, versions: list[str], found: _Contents) -> None:
    path, label = entry / "graph.pbtxt", f"'{_shown(entry.name)}/graph.pbtxt'"
    try:
        is_numbered = is_version(entry.name)
        if is_numbered and entry.is_dir():
            versions.append(entry.name)
        if not path.exists():
            if path.is_symlink():
                found.leave_out(f"{label} is a link that leads nowhere", is_readable=False)
        elif not is_numbered:
            found.leave_out(f"{label}: the folder is no version, which is a whole number from 1 without leading zeros")
        elif not path.is_file():
            found.leave_out(f"{label} is no regular file")
        else:
            found.files.append(_file(entry.parent.name, entry.name, path))
    except OSError as error:
        found.leave_out(f"{label} cannot be read: {error.strerror}", is_readable=False)


def _file(name: str, version: str, path: Path) -> VersionFile:
    status = path.stat()
    return VersionFile(name, version, path, (status.st_ctime_ns, status.st_size, status.st_ino))


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _served_versions(config: Path, versions: list[str]) -> list[str]:
    try:
        graph, _ = pbtxt.parse(config.read_bytes(), graph_pb2.Graph(), file=str(config))
    except (pbtxt.PbtxtError, OSError):
        return versions[-1:]  # the compiler reports it
    return list(map(str, versions_to_serve(graph.version_policy, list(map(int, versions)))))
