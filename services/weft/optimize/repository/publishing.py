"""A new version in a repository, whole or not at all, beside the others and never over one."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from weft.base.errors import AlreadyExistsError, UnavailableError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.versions import is_version
from weft.jobs.atomic_files import check_writable, replace_file


def check_publishable(folder: Path) -> None:
    """Check that a version could be added to a model. Raises PermissionDeniedError."""
    config = (folder / CONFIG_FILENAME).resolve()
    check_writable((folder.parent, folder, config.parent), "--dry-run does all but that")


@contextlib.contextmanager
def held_model(folder: Path) -> Iterator[None]:
    """Hold a model's folder, so that no other run writes a version meanwhile.

    What a run left that was killed while it wrote is removed.

    Raises:
        UnavailableError: Another run holds it.
        OSError: The folder cannot be read.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"another `weft optimize` works on '{folder.name}'; wait for it") from None
        for entry in folder.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(folder.name)}\.version\.[0-9]+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def publish(folder: Path, version: int, files: Path, config_text: str) -> Path:
    """Add a version to a model.

    The files are copied into a hidden folder beside the model, which no service looks into, and written to the disk.
    Then ``config.pbtxt`` gets its new text and the folder its name, each in one step. If the second fails, the first is
    taken back.

    Args:
        folder: Of the model; held.
        version: A number that is free.
        files: Folder with the files of the version.
        config_text: New text of ``config.pbtxt``.

    Returns:
        Folder of the version.

    Raises:
        AlreadyExistsError: The version exists.
        OSError: The files cannot be written; the model is as it was.
    """
    target = folder / str(version)
    if target.exists() or target.is_symlink():
        raise AlreadyExistsError(f"'{folder.name}' has a version {version} already; nothing was written")
    hidden = folder.parent / f".{folder.name}.version.{version}"
    config = (folder / CONFIG_FILENAME).resolve()
    before = config.read_bytes()
    mode = config.stat().st_mode
    try:
        shutil.copytree(files, hidden)
        like = next(entry for entry in folder.iterdir() if is_version(entry.name) and entry.is_dir())
        shutil.copymode(like, hidden)
        for path in hidden.rglob("*"):
            _sync(path)
        _sync(hidden)
        with _undisturbed():
            try:
                replace_file(config, config_text.encode())
                config.chmod(mode)
                hidden.rename(target)
            except OSError:
                replace_file(config, before)
                config.chmod(mode)
                raise
        _sync(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return target


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and a request to end wait until the block has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
