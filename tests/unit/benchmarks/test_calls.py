"""The count of Python calls."""

from collections import Counter

import pytest
from benchmarks import calls
from benchmarks.calls import MODEL_SERVICE, ROUTER, Line

pytestmark = pytest.mark.long


async def test_each_request_takes_the_same_number_of_calls() -> None:
    """The counts are exact, and a step through the router costs calls on both sides."""
    counts = await calls.count(num_requests=3)
    cases = (counts.alone, counts.passed_through, counts.one_step, counts.three_steps)
    assert all(case.is_exact for case in cases)
    assert 0 == counts.alone.router
    assert 0 < counts.one_step.router < counts.three_steps.router
    assert counts.one_step.both < counts.three_steps.both
    assert 1 < counts.nesting


async def test_a_request_takes_no_more_calls_than_the_goals() -> None:
    """Every figure that has a goal is within it."""
    lines = (await calls.count(num_requests=1)).lines()
    assert [] == [f"{line.case}: {line.value}, at most {line.goal}" for line in lines if not line.is_met]


async def test_the_functions_add_up_to_the_count() -> None:
    """Every call is named by its function, of the side that made it."""
    counts = await calls.count(num_requests=1)
    sides: Counter[str] = Counter()
    for (side, _), number in counts.one_step.by_function.items():
        sides[side] += number
    assert {MODEL_SERVICE: counts.one_step.model_service, ROUTER: counts.one_step.router} == sides


def test_a_table_shows_figures_beside_their_goals() -> None:
    """A missed goal is marked; a figure without a goal is only shown."""
    lines = [Line("alone", 101, 100, 141), Line("graph", 400, 400, 697), Line("through", 7, is_exact=False)]
    assert [False, True, True] == [line.is_met for line in lines]
    header, *rows = calls.render(lines).splitlines()
    assert ["now", "goal", "before"] == header.split()[-3:]
    assert [["alone", "101", "100", "141", "missed"], ["graph", "400", "400", "697"], ["through", "7", "(varies)"]] == [
        row.split() for row in rows
    ]


def test_a_profile_is_off_when_the_program_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """``--verbose`` lists functions; the exit status says whether every goal is met."""
    status = calls.main(["--verbose"])
    shown = capsys.readouterr().out
    assert status == int("missed" in shown)
    assert "V2Servicer.ModelInfer" in shown
