"""The benchmark of router and models in one process."""

import pytest
from benchmarks import fused
from benchmarks.fused import LOADS, Row


def test_a_quick_run_prints_a_line_for_each_case_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Machine, header, and figures of the one case with each load; no file is written."""
    assert 0 == fused.main(["--quick", "--only", "identity_py, graph of 1"])
    *_, header, first, second, third, last = capsys.readouterr().out.splitlines()
    assert ["case", "load"] == header.split()[:2]
    lines = zip(LOADS, (first, second, third, last), strict=True)
    assert all(line.startswith(f"identity_py, graph of 1 step  {load.name} ") for load, line in lines)


def test_what_a_step_costs_is_the_distance_of_two_graphs() -> None:
    """A third of that between four steps and one, of the same model and load."""
    rows = [
        Row(f"m, graph of {steps}", load, cpu_us, 0.0, 0.0, 0.0, 0.0)
        for load in ("1x1", "4x8")
        for steps, cpu_us in (("1 step", 40.0), ("4 steps", 100.0 if load == "1x1" else 70.0))
    ]
    assert [None, "20.0", None, "10.0"] == [
        line.split()[-1] if "4 steps" in line else None for line in fused.render(rows).splitlines()[1:]
    ]


def test_a_profile_names_functions(capsys: pytest.CaptureFixture[str]) -> None:
    """With microseconds and calls of one request."""
    assert 0 == fused.main(["--profile", "--quick", "--only", "identity_py, graph of 1", "--load", "1 at once"])
    assert "router/core.py" in capsys.readouterr().out


def test_a_name_that_no_case_has_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are listed."""
    assert 2 == fused.main(["--only", "nothing"])
    assert "no case has 'nothing' in its name: identity_py, " in capsys.readouterr().err
