"""``weft batch``: which engine runs a job, and what is shown of it."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from weft.cli.__main__ import main
from weft.cli.commands.batch import BatchDisplay
from weft.jobs.batch import Progress


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
    assert "UNIMPLEMENTED: weft batch needs 'ray': pip install 'weft-mesh[ray]'" in capsys.readouterr().err


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _display(cost_per_hour: float | None) -> tuple[BatchDisplay, _Clock, io.StringIO]:
    clock, screen = _Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140, color_system=None)
    return BatchDisplay("embed", console, cost_per_hour, clock), clock, screen


def test_time_left_and_cost_count_what_this_run_has_done() -> None:
    """A resumed job is as fast as its own rows: 20 % of the data in 10 s leave 25 s for the other 50 %."""
    display, clock, screen = _display(3.6)
    skipped = Progress(0, 0, 0, 8).plus(300, 0.3, num_skipped=300)
    assert display.state(skipped) == "300 rows, 0 failed, 0 rows/s"
    clock.now_s += 10.0
    progress = skipped.plus(2_000, 0.2, num_failed=7, window=9)
    with display.bar() as show:
        show(progress)
    assert "2,300 rows, 7 failed, 200 rows/s, 0:00:25 left, 5 per million rows" in screen.getvalue()
    assert " 50%" in screen.getvalue()
    assert display.facts(progress) == {
        "num_rows": 2_300,
        "num_failed": 7,
        "num_skipped": 300,
        "num_bad_files": 0,
        "window": 9,
        "duration_s": 10.0,
        "rows_per_s": 200.0,
        "cost": pytest.approx(0.01),
        "cost_per_million_rows": pytest.approx(5.0),
    }
    assert display.end(progress, "o") == (
        "2300 rows in 'o', 7 of them failed (failed/ says why); 2000 in 10.0 s, 200 rows/s, 5 per million rows"
    )


def test_without_a_cost_there_is_none() -> None:
    """Nothing is said of cost unless the machine has one, and of a job without new rows none can be said."""
    display, _, _ = _display(None)
    assert not [name for name in display.facts(Progress(1, 0, 0, 1)) if "cost" in name]
    display, clock, _ = _display(1.0)
    clock.now_s += 1.0
    assert display.facts(Progress(5, 0, 5, 1, 1.0, 1.0))["cost_per_million_rows"] is None
    assert display.end(Progress(0, 0, 0, 1), "o") == "0 rows in 'o', 0 of them failed; 0 in 1.0 s, 0 rows/s"
