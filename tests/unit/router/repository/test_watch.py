"""Graph files that change while they are looked at, or cannot be read, while the router runs."""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.make import StartedRouter
from tests.unit.router.pipes import answered_by, named

from weft.base.errors import NotFoundError, UnavailableError
from weft.base.repository.control import RepositoryWatcher
from weft.router.repository.files import VersionFile
from weft.router.repository.lifecycle import GraphLifecycle


@dataclass
class WatchedRouter(StartedRouter):
    """A router in poll mode.

    Attributes:
        look: The watcher looks at the files.
        reason: State of the graph's version, and why.
    """

    look: Callable[[], Awaitable[None]]
    reason: Callable[..., tuple[str, str]]


@asynccontextmanager
async def watched(
    root: Path, target: FakeTarget, settle: Callable[[], None] = lambda: None
) -> AsyncIterator[WatchedRouter]:
    """A router in poll mode whose watcher looks when it is told to; `settle` is called between its two looks."""
    async with make.started(root, target, model_control="poll", repository_poll_s=3_600.0) as s:
        watcher = s.core._watcher

        async def settled() -> None:
            settle()

        watcher.settle = settled  # type: ignore[method-assign]

        def reason(version: str = "1") -> tuple[str, str]:
            return next((e.state, e.reason) for e in s.core.index(ready_only=False) if e[:2] == ("pipe", version))

        yield WatchedRouter(s.core, s.refresh, watcher.look, reason)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", 'name: "pipe"\nmax_batch_size: 4\n'])
async def test_an_ensemble_that_an_edit_has_emptied_goes_on(tmp_path: Path, target: FakeTarget, text: str) -> None:
    """Also where its version folder has a file, so that it could be a model; the finished edit is taken over."""
    make.write(tmp_path, named("a"))
    path = tmp_path / "pipe/1/graph.pbtxt"
    config = path.rename(tmp_path / "pipe/config.pbtxt")
    ensemble = config.read_text()
    (tmp_path / "pipe/1/keep").touch()
    config.write_text(ensemble)
    async with watched(tmp_path, target) as s:
        assert "a/1" == await answered_by(s.core)
        config.write_text(text)
        await s.look()
        assert "a/1" == await answered_by(s.core)
        config.write_text(ensemble.replace('name: "a"', 'name: "b"'))
        await s.look()
        assert "b/1" == await answered_by(s.core)


async def test_a_file_that_still_changes_is_left_for_later(tmp_path: Path, target: FakeTarget) -> None:
    """A beginning that is a whole graph by itself is not taken for one; nor is a file gone that is only replaced."""
    make.write(tmp_path, named("a"))
    writes = [named("b"), named("b") + "policy { timeout_ms: 1000 }"]
    async with watched(tmp_path, target, lambda: make.write(tmp_path, writes[-1])) as s:
        make.write(tmp_path, writes[0])
        await s.look()
        assert "a/1" == await answered_by(s.core)
        (tmp_path / "pipe/1/graph.pbtxt").unlink()
        await s.look()  # it is there again before the second look
        assert "a/1" == await answered_by(s.core)
    async with watched(tmp_path, target) as s:
        assert "b/1" == await answered_by(s.core)


async def test_a_change_of_the_same_length_within_the_clocks_grain_is_seen(tmp_path: Path, target: FakeTarget) -> None:
    """Editors that replace the file give it another inode."""
    make.write(tmp_path, named("a"))
    path = tmp_path / "pipe/1/graph.pbtxt"
    before = path.stat()
    async with watched(tmp_path, target) as s:
        draft = tmp_path / "draft"
        draft.write_text(named("b"))
        os.utime(draft, ns=(before.st_atime_ns, before.st_mtime_ns))
        draft.replace(path)
        await s.look()
        assert "b/1" == await answered_by(s.core)


async def test_a_repository_that_cannot_be_read_takes_nothing_out(
    tmp_path: Path, target: FakeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the whole of it, as when a disk is lost, nor one folder; it is told once."""
    make.write(tmp_path, named("a"))
    folder, away = tmp_path / "pipe", tmp_path.with_name("away")
    async with watched(tmp_path, target) as s:
        os.rename(tmp_path, away)
        for _ in range(2):
            await s.look()
        os.rename(away, tmp_path)
        assert 1 == sum("the graph repository cannot be read" in record.message for record in caplog.records)
        iterdir = Path.iterdir

        def guarded(path: Path) -> Any:
            if path == folder:
                raise PermissionError(13, "Permission denied")
            return iterdir(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "iterdir", guarded)
            await s.look()
        assert "a/1" == await answered_by(s.core)


async def test_a_file_that_cannot_be_read_is_tried_again(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing of it has changed since."""
    make.write(tmp_path, named("a"))
    async with watched(tmp_path, target) as s:
        make.write(tmp_path, named("b"))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(13, "no", str(path))))
            await s.look()
        assert "cannot be read: no" in s.reason()[1]
        await s.look()
        assert "b/1" == await answered_by(s.core)


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_file_that_goes_between_two_looks_is_gone(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """It was there when the folder was listed, and not when it was read: nothing waits for it for ever."""
    if not is_new:
        make.write(tmp_path, named("a"))
    async with watched(tmp_path, target) as s:
        make.write(tmp_path, named("b"))
        read_bytes = Path.read_bytes

        def gone(path: Path) -> bytes:
            shutil.rmtree(tmp_path / "pipe", ignore_errors=True)
            return read_bytes(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", gone)
            await s.look()
        assert "cannot be read: No such file or directory" in s.reason()[1]
        assert is_new != s.core.is_ready()
        await s.look()
        assert s.core.is_ready()
        assert [] == [entry for entry in s.core.index(ready_only=False) if entry.name == "pipe"]


async def test_polling_goes_on_after_a_fault(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A defect is logged, and the next look comes; the router's own watcher works as this one does."""
    looked = asyncio.Event()
    count = 0

    async def look(watcher: RepositoryWatcher) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise RuntimeError("boom")
        looked.set()

    monkeypatch.setattr(RepositoryWatcher, "look", look)
    with caplog.at_level(logging.ERROR):
        async with make.started(tmp_path, target, model_control="poll", repository_poll_s=0.001):
            async with asyncio.timeout(10):
                await looked.wait()
    assert "the graph repository could not be followed" in caplog.text
    assert 0 == make.num_other_tasks()


async def test_a_folder_that_cannot_be_read_is_not_loaded(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other versions are not taken for all that there is; without a repository the router does not start."""
    make.write(tmp_path, named("a"))
    make.write(tmp_path, named("b"), version="2")
    stat = Path.stat

    def guarded(path: Path, **options: bool) -> Any:
        if path.parent == tmp_path / "pipe/2":
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe"]) as s:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", guarded)
            with pytest.raises(
                UnavailableError, match=r"load 'pipe': '2/graph.pbtxt' cannot be read: Permission denied"
            ):
                await s.core.load("pipe", {})
        assert "b/2" == await answered_by(s.core)
    with pytest.raises(UnavailableError, match=r"the graph repository cannot be read: .*No such file"):
        async with make.started(tmp_path / "nowhere", target):
            pass
    with pytest.raises(NotFoundError, match="failed to load 'nobody'"):
        async with make.started(tmp_path, target, model_control="explicit", load_graphs=["pipe", "nobody"]):
            pass


async def test_a_load_goes_on_when_its_client_is_gone(
    tmp_path: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is never left half loaded; when the router closes, nothing is left."""
    make.write(tmp_path, named("a"))
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        make.write(tmp_path, named("b"))
        make.write(tmp_path, named("c"), version="2")
        is_reached, release = asyncio.Event(), asyncio.Event()
        read = GraphLifecycle._read

        async def slow(loader: GraphLifecycle, file: VersionFile) -> Any:
            if file.version == "2":
                is_reached.set()
                await release.wait()
            return await read(loader, file)

        monkeypatch.setattr(GraphLifecycle, "_read", slow)
        client = asyncio.create_task(s.core.load("pipe", {}))
        await is_reached.wait()
        client.cancel()
        await asyncio.wait((client,))
        release.set()
        await s.core.load("pipe", {})
        assert "c/2" == await answered_by(s.core)
        await s.core.load("pipe", {"rollback": True})
        assert "a/1" == await answered_by(s.core)
        is_reached.clear()
        release.clear()
        client = asyncio.create_task(s.core.load("pipe", {}))
        await is_reached.wait()
    assert isinstance((await asyncio.gather(client, return_exceptions=True))[0], asyncio.CancelledError)
    assert 0 == make.num_other_tasks()
