"""The model repository: what is on disk, and loads and unloads that models ask for.

::

    <repository>/<model>/config.pbtxt               may be missing where the model's files say enough
    <repository>/<model>/<version>/...      version: a whole number of at least 1
"""

import asyncio
import re
import stat
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.repository.layout import CONFIG_FILENAME, has_files, names_backend, runs_in_router
from weft.base.versions import is_version
from weft.serving.lifecycle.background import on_loop

_UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]")
_SKIPPED = "__pycache__"

#: Every file below a model's folder, with what changes when the file does: size, time, inode.
Fingerprint = tuple[tuple[str, int, int, int], ...]


class ModelRepository:
    """Read-only view of a folder of models. Every method reads the disk and blocks: not for the event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._named: set[str] = set()  # models whose configuration has named a backend

    def names(self) -> list[str]:
        """Names of the models, sorted; without hidden folders and ensembles, which a router serves."""
        return sorted(
            entry.name
            for entry in self.root.iterdir()
            if entry.is_dir()
            and not entry.name.startswith(".")
            and entry.name != _SKIPPED
            and not _runs_in_router(entry)
        )

    def directory(self, name: str) -> Path:
        """Folder of a model.

        Raises InvalidArgumentError if ``name`` is no single path component, NotFoundError if there is no such folder.
        """
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
        """Fingerprint of each model now, without files that vanish meanwhile.

        A model whose configuration names no backend, platform or model file, and did so before, is being edited: it is
        as in ``known``. Raises OSError.
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


def _runs_in_router(directory: Path) -> bool:
    try:
        return runs_in_router(directory / CONFIG_FILENAME)
    except FileNotFoundError:
        return any(directory.glob("*/graph.pbtxt"))
    except OSError:
        return False  # its faults are reported at load


def _fingerprint(directory: Path) -> Fingerprint:
    files: list[tuple[str, int, int, int]] = []
    for path in directory.rglob("*"):
        if _SKIPPED in path.parts:  # written when a model.py is imported
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


class Loader(Protocol):
    """Loads and unloads models: the core of this process."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether the version ("" = any) serves. Raises NotFoundError."""

    async def load_nested(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a model without waiting for other loads. Raises WeftError."""

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model. Raises WeftError."""


class ModelControl:
    """The ``RepositoryControl`` of a service; any thread. ``loader`` is used on its event loop alone."""

    def __init__(self, loader: Loader, loop: asyncio.AbstractEventLoop) -> None:
        self._loader = loader
        self._loop = loop
        #: Models that each model loads or unloads now.
        self._waits_for: dict[str, list[str]] = {}
        self._unloads: set[asyncio.Task[None]] = set()

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Load ``name`` for the model ``asker``, which waits meanwhile; the future fails with a WeftError."""
        return self._submit(self._load(asker, name, parameters))

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Unload a model; a model that unloads itself is not awaited."""
        return self._submit(self._unload(asker, name, unload_dependents))

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Whether the version ("" = any) serves; False for an unknown one."""
        return self._submit(self._is_ready(name, version))

    async def _load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        with self._waiting("load", asker, name):
            await self._loader.load_nested(name, parameters)

    async def _unload(self, asker: str, name: str, unload_dependents: bool) -> None:
        if asker != name:
            with self._waiting("unload", asker, name):
                await self._loader.unload(name, unload_dependents=unload_dependents)
            return
        task = asyncio.create_task(self._loader.unload(name, unload_dependents=unload_dependents))
        await asyncio.wait([task], timeout=0)  # it ends after this request is answered; faults are known at once
        if task.done():
            await task
        else:
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _is_ready(self, name: str, version: str) -> bool:
        try:
            return self._loader.is_model_ready(name, version)
        except NotFoundError:
            return False

    @contextmanager
    def _waiting(self, action: str, asker: str, name: str) -> Iterator[None]:
        awaited = {name}
        while more := {after for model in awaited for after in self._waits_for.get(model, ())} - awaited:
            awaited |= more
        if asker in awaited:
            raise InvalidArgumentError(
                f"failed to {action} '{name}': model '{asker}', which asks for it, would wait for itself; a model can "
                "load neither itself nor one that loads it, nor unload that"
            )
        self._waits_for.setdefault(asker, []).append(name)
        try:
            yield
        finally:
            self._waits_for[asker].remove(name)
            if not self._waits_for[asker]:
                del self._waits_for[asker]

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return on_loop(coroutine, self._loop, "the service is stopping; it loads and unloads no models")
