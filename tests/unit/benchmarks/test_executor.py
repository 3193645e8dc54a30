"""The benchmark of the executor alone."""

from dataclasses import replace

import pytest
from benchmarks import executor
from benchmarks.executor_cases import CASES, Case
from benchmarks.report import table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_every_case_does_what_its_name_says(case: Case) -> None:
    """Its graph compiles, and a request makes the calls that are counted as its."""
    await (await executor.prepare(case))()


async def test_a_case_that_does_something_else_is_refused() -> None:
    """A figure without the work that it stands for would be worse than none."""
    with pytest.raises(RuntimeError, match="sequence of 1: 1 calls, not 7"):
        await executor.prepare(replace(CASES[0], num_calls=7))


async def test_the_calls_are_subtracted_and_the_rest_is_divided_by_the_steps() -> None:
    """Three steps: added is CPU less three calls, and three times what a step adds."""
    (row, router) = await executor.measure([CASES[1]], num_rounds=2, num_requests=20)
    assert ("sequence of 3", 3, 3) == (row.case, row.num_steps, row.num_calls)
    assert 0 < row.added_us < row.cpu_us
    assert abs(row.added_us - 3 * row.added_per_step_us) < 0.1
    assert "sequence of 3, RouterCore.infer" == router.case
    assert row.cpu_us < router.cpu_us


def test_a_quick_run_prints_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Machine, header, the case, the same through the router; no file is written."""
    assert 0 == executor.main(["--quick", "--only", "ensemble"])
    *_, header, case, router = capsys.readouterr().out.splitlines()
    assert "graph" == header.split()[0]
    assert case.startswith("ensemble of 3, AVERAGE  ")
    assert router.startswith("ensemble of 3, AVERAGE, RouterCore.infer")


def test_a_profile_names_functions(capsys: pytest.CaptureFixture[str]) -> None:
    """With microseconds and calls of one request."""
    assert 0 == executor.main(["--profile", "--quick", "--only", "random"])
    lines = capsys.readouterr().out.splitlines()
    executes = [line for line in lines if line.endswith(" execute") and "router/executor.py" in line]
    assert ["1.0"] == [line.split()[1] for line in executes[:1]]


def test_a_name_that_no_case_has_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are listed."""
    assert 2 == executor.main(["--only", "nothing"])
    assert "no case has 'nothing' in its name: sequence of 1, " in capsys.readouterr().err


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Flush right, except for those that are said to be flush left; no blanks at the end."""
    assert "a    bb\nccc   d" == table([["a", "bb"], ["ccc", "d"]], left_columns={0})
    assert "  a  bb\nccc  d" == table([["a", "bb"], ["ccc", "d"]], left_columns={1})
