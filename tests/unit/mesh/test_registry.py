"""Which mesh `weft top` and `weft restart` take."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.base.processes.process import Endpoint
from weft.cli.__main__ import main
from weft.mesh.registry import RunningMesh, SeveralMeshesError, mesh_folder, publish, the_mesh


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Where a test's meshes run until it ends; no others are seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as stack:
        yield stack


def run_mesh(running: ExitStack, port: int, *, pid: int = 0, is_encrypted: bool = False) -> Path:
    """A mesh of a router and two services, one of them in its process; its folder."""
    router = Endpoint(f"0.0.0.0:{port}", f"0.0.0.0:{port + 1}", 1)
    endpoints = {"router": router, "preprocess": router, "model": Endpoint("127.0.0.1:5", "127.0.0.1:6", 2)}
    folder = running.enter_context(mesh_folder())
    publish(folder, RunningMesh(pid, is_encrypted, endpoints))
    return folder


def test_the_only_mesh_is_meant_or_that_of_the_address(running: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    """Several without an address are named; no mesh has an address of none."""
    assert the_mesh(None, lambda mesh: mesh.router) is None
    run_mesh(running, 8001)
    assert {"router": "127.0.0.1:8002", "model": "127.0.0.1:6"} == the_mesh(None, _router).metrics_addresses()
    run_mesh(running, 9001, is_encrypted=True)
    with pytest.raises(SeveralMeshesError, match="give --url one of"):
        the_mesh(None, _router)
    assert "https://127.0.0.1:9002/metrics" == the_mesh("127.0.0.1:9001", _router).metrics_addresses()["router"]
    assert the_mesh("127.0.0.1:7001", _router) is None
    assert [2, 1] == [main(["top", "--once"]), main(["restart"])]
    assert 2 == capsys.readouterr().err.count("several meshes run; give --url one of")


def test_the_ports_for_clients_are_the_encrypted_ones() -> None:
    """Those of router and gateway; the others stay among themselves."""
    endpoints = {name: Endpoint("0.0.0.0:1", f"0.0.0.0:{port}", 1) for name, port in PORTS.items()}
    expected = {
        "router": "https://127.0.0.1:2/metrics",
        "model": "127.0.0.1:4",
        "gateway": "https://127.0.0.1:6/metrics",
    }
    assert expected == RunningMesh(1, True, endpoints).metrics_addresses()


PORTS = {"router": 2, "model": 4, "gateway": 6}


def test_what_is_no_running_mesh_is_not_found(running: ExitStack, tmp_path: Path) -> None:
    """A folder without an owner, one of another program, one that says nothing yet or what cannot be read."""
    (tmp_path / "weft-other").mkdir()
    (tmp_path / "weft-other" / "mesh.json").write_text('{"pid": 1, "is_encrypted": false, "endpoints": {}}')
    (tmp_path / "weft-file").touch()
    running.enter_context(mesh_folder())
    for text in ("", "[]", "{", '{"pid": 1}', '{"pid": 1, "is_encrypted": false, "endpoints": {"router": 5}}'):
        (running.enter_context(mesh_folder()) / "mesh.json").write_text(text)
    assert the_mesh(None, _router) is None


def test_the_restart_command_signals_that_mesh(running: ExitStack) -> None:
    """SIGUSR1, as a person would send it."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        run_mesh(running, 8001, pid=os.getpid())
        assert 0 == main(["restart", "--url", "127.0.0.1:8001"])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [signal.SIGUSR1] == got


def _router(mesh: RunningMesh) -> str:
    return mesh.router


_OWNER = """
import sys
from weft.mesh.registry import mesh_folder
with mesh_folder() as folder:
    (folder / "model.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Where temporary files go, in this process and in those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def owner():
    """A process that owns a folder; it is killed at the end."""
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.folder = Path(process.stdout.readline().strip())  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            process.kill()


def test_folder_is_private_and_goes_at_the_end(parent):
    """With everything in it."""
    with mesh_folder() as folder:
        (folder / "mesh.key").write_text("secret")
        assert (parent, 0o700) == (folder.parent, stat.S_IMODE(folder.stat().st_mode))
    assert [] == list(parent.iterdir())


def test_folder_of_a_killed_owner_goes_at_the_next_start(parent):
    """One killed with -9 leaves it; that of an owner that lives, and what is no mesh's, stays."""
    (parent / "weft-notes").mkdir()
    (parent / "weft-file").write_text("mine")
    with owner() as killed:
        pass
    assert killed.folder.is_dir()
    with owner() as alive:
        assert {"weft-notes", "weft-file", alive.folder.name} == {path.name for path in parent.iterdir()}
        with mesh_folder():
            assert (alive.folder / "model.sock").exists()


def test_link_to_a_folder_is_not_followed(parent, tmp_path_factory):
    """What a link of that name points to is kept, though nobody owns it."""
    with owner() as killed:
        pass
    elsewhere = killed.folder.rename(tmp_path_factory.mktemp("elsewhere") / "folder")
    (parent / "weft-link").symlink_to(elsewhere)
    with mesh_folder():
        assert (elsewhere / "model.sock").exists()
