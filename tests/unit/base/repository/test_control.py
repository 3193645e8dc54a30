"""Model control: what clients may load, and what is taken over from files that change."""

import argparse
import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from weft.base.errors import UnavailableError
from weft.base.repository.control import (
    ClientControl,
    RepositoryWatcher,
    add_control_arguments,
    control_fault,
)
from weft.base.text.argument_types import given_arguments
from weft.serving.lifecycle.repository import Fingerprint, ModelRepository


def parsed(*arguments: str) -> argparse.Namespace:
    """The arguments of a service that loads graphs."""
    parser = argparse.ArgumentParser()
    add_control_arguments(parser, "graph")
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], ""),
        (["--model-control-mode", "explicit", "--load-model", "g"], ""),
        (["--load-model", "g"], "--load-model needs --model-control-mode explicit; without it every graph is loaded"),
        (["--repository-poll-secs", "0"], "--repository-poll-secs must be above 0 and at most 86400, got 0"),
        (["--repository-poll-secs", "nan"], "--repository-poll-secs must be above 0 and at most 86400, got nan"),
    ],
)
def test_faults_of_arguments_are_named(arguments: list[str], fault: str) -> None:
    """With the option and its value; "" where there is none."""
    assert fault == control_fault(parsed(*arguments), "graph")


def test_arguments_are_passed_on_to_another_process() -> None:
    """What is parsed of them there is what was parsed here."""
    options = parsed("--model-control-mode", "explicit", "--load-model", "a", "--load-model", "b")
    assert options == parsed(*given_arguments(options, vars(options)))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (
            "none",
            "if polling is enabled or models are loaded once; start the router with --model-control-mode explicit",
        ),
        ("poll", "is not allowed if polling is enabled; change the files, or start the router with"),
    ],
)
def test_clients_change_nothing_but_in_explicit_mode(mode: str, message: str) -> None:
    """The error says what does."""
    with pytest.raises(UnavailableError, match=message):
        ClientControl(mode, "router").check()
    ClientControl("explicit", "router").check()


async def test_a_change_goes_on_when_its_client_leaves() -> None:
    """It is not left half done; only the end of the service cancels it."""
    control, has_begun, may_end, is_done = ClientControl("explicit", "router"), *(asyncio.Event() for _ in range(3))

    async def change() -> None:
        has_begun.set()
        await may_end.wait()
        is_done.set()

    client = asyncio.create_task(control.finish(change()))
    await has_begun.wait()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    may_end.set()
    async with asyncio.timeout(10):
        await is_done.wait()
    await control.close()


async def test_the_end_of_the_service_cancels_changes() -> None:
    """`close` returns when none is left."""
    control = ClientControl("explicit", "router")
    client = asyncio.create_task(control.finish(asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await control.close()
    with pytest.raises(asyncio.CancelledError):
        await client


class Followed:
    """A repository, its watcher, and what the watcher did."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[tuple[str, str]] = []
        self.on_settle: Callable[[], object] = lambda: None
        self.known: dict[str, Fingerprint] = {}
        self.scan = ModelRepository(root).fingerprints
        self.watcher = RepositoryWatcher("model repository", self.scan, self.known, self._take_over, 0.0)
        self.watcher.settle = self._settle  # type: ignore[method-assign]

    def write(self, name: str, text: str = "x") -> Path:
        """A model of one file."""
        path = self.root / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    async def look(self) -> list[tuple[str, str]]:
        """What one look did."""
        self.done.clear()
        await self.watcher.look()
        return sorted(self.done)

    async def _take_over(self, changes: Mapping[str, Fingerprint | None]) -> None:
        self.done += [("unload" if state is None else "load", name) for name, state in changes.items()]

    async def _settle(self) -> None:
        self.on_settle()


@pytest.fixture
async def followed(tmp_path: Path) -> Followed:
    """A repository with the models a and b, taken over."""
    followed = Followed(tmp_path)
    followed.write("a")
    followed.write("b")
    followed.known.update(followed.scan())
    return followed


async def test_what_is_there_at_the_start_is_not_loaded_again(followed: Followed) -> None:
    """Nothing is done while nothing changes."""
    assert [] == await followed.look()


async def test_added_changed_and_removed(followed: Followed) -> None:
    """A new model and one with a changed file are loaded, one that is gone is unloaded; once."""
    followed.write("a", "changed")
    shutil.rmtree(followed.root / "b")
    followed.write("c")
    assert [("load", "a"), ("load", "c"), ("unload", "b")] == await followed.look()
    assert [] == await followed.look()


async def test_the_same_size_and_time_with_another_file(followed: Followed) -> None:
    """A file that was moved in place of another is noticed although size and time are the same."""
    path = followed.write("a")
    times = path.stat()
    await followed.look()
    other = followed.root / "other"
    other.write_text("y")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    assert [("load", "a")] == await followed.look()


async def test_a_model_that_is_being_copied_is_left_to_the_next_look(followed: Followed) -> None:
    """A model that changes while it settles is not loaded half, and others do not wait for it."""
    followed.write("a", "first half")
    followed.write("b", "whole")
    followed.on_settle = lambda: followed.write("a", "first half and second")
    assert [("load", "b")] == await followed.look()
    followed.on_settle = lambda: None
    assert [("load", "a")] == await followed.look()


async def test_a_new_version_folder_is_a_change(followed: Followed) -> None:
    """A version that is added or removed is noticed."""
    path = followed.root / "a" / "2" / "model.onnx"
    path.parent.mkdir()
    path.write_text("x")
    assert [("load", "a")] == await followed.look()
    shutil.rmtree(path.parent)
    assert [("load", "a")] == await followed.look()


async def test_what_python_writes_when_it_imports_is_no_change(followed: Followed) -> None:
    """Byte code beside a model.py does not reload the model."""
    path = followed.root / "a" / "1" / "__pycache__" / "model.pyc"
    path.parent.mkdir()
    path.write_text("x")
    assert [] == await followed.look()


async def test_a_repository_that_cannot_be_read(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    """Looks at a repository that is away change nothing; the log says it once."""
    away = followed.root.with_name("away")
    followed.root.rename(away)
    for _ in range(2):
        assert [] == await followed.look()
    assert ["the model repository cannot be read, what serves goes on"] == [
        record.message.partition(":")[0] for record in caplog.records
    ]
    away.rename(followed.root)
    assert [] == await followed.look()
