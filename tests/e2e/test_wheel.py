"""The wheel, as a user installs it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.conftest import Up

from weft import __version__
from weft.base.tensors import decode

ROOT = Path(__file__).parents[2]


def test_the_wheel_serves_a_new_repository(
    up: Callable[..., Up], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built, installed into an empty folder and run from there: `weft init`, `weft check`, `weft up`, a request."""
    site, mine = tmp_path / "site", tmp_path / "mine"
    offline = ["--no-deps", "--no-index", "--quiet"]  # dependencies are those of this environment
    for arguments in (
        ["wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)],
        ["install", "--no-compile", "--target", str(site), str(tmp_path / f"weft_mesh-{__version__}-py3-none-any.whl")],
    ):
        subprocess.run([sys.executable, "-m", "pip", *arguments, *offline], check=True, timeout=120)
    monkeypatch.setenv("PYTHONPATH", str(site))
    weft = [sys.executable, str(site / "bin" / "weft")]
    where = [sys.executable, "-c", "import weft; print(weft.__file__)"]
    assert f"{site}/weft/__init__.py\n" == subprocess.run(where, capture_output=True, text=True, check=True).stdout
    for arguments in (["init", str(mine)], ["check", str(mine)]):
        subprocess.run([*weft, *arguments], check=True, timeout=60, cwd=tmp_path)
    mesh = up(repository=mine)
    assert [[4.0]] == decode(mesh.call("quadruple").outputs["Y"]).tolist()
    assert f"PYTHONPATH={site}" in Path(f"/proc/{mesh.endpoints['model']['pid']}/environ").read_text()
    assert 0 == mesh.stop()
