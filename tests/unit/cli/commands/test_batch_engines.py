"""Which options of `weft batch` go together, and what it says of those that do not."""

import sys
from pathlib import Path

import pytest

from weft.cli.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ray-address", "a:1"), "--ray-address is for --engine ray"),
        (("--ray-workers", "2"), "--ray-workers is for --engine ray"),
        (("--in-process",), "--in-process is for --engine ray"),
        (("--engine", "ray", "--in-process", "--url", "a:1"), "leave --url out, or --in-process"),
        (("--engine", "ray", "--ray-address", "a:1"), "a cluster of Ray needs --url"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started or written."""
    assert main(["batch", "simple", "--input", "in.csv", "--output", str(tmp_path / "o"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_cluster_that_the_environment_names_needs_a_router_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAY_ADDRESS counts as --ray-address does."""
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    assert main(["batch", "simple", "--input", "i.csv", "--output", str(tmp_path / "o"), "--engine", "ray"]) == 1
    assert "a cluster of Ray needs --url" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is what to install."""
    monkeypatch.delitem(sys.modules, "weft.jobs.ray_engine", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["batch", "simple", "--input", "in.csv", "--output", str(tmp_path / "o"), "--engine", "ray"]
    assert main([*command, "--url", "127.0.0.1:1"]) == 1
    assert "UNIMPLEMENTED: weft batch --engine ray needs 'ray': pip install 'weft-mesh[ray]'" in capsys.readouterr().err
