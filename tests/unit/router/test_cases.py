"""What becomes of requests, by kept cases: see ``graph_cases.py`` for the form of the files under ``cases/``."""

from pathlib import Path

import pytest
from tests.unit.router.graph_cases import Case, cases_of, check
from tests.unit.router.virtual_clock import VirtualClock

CASES = [case for file in sorted(Path(__file__).parent.glob("cases/*.txt")) for case in cases_of(file)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file.stem}: {case.title}")
async def test_a_graph_answers(virtual_clock: VirtualClock, case: Case) -> None:
    """As the graph says, over models that answer as the case says; no call and no task is left behind."""
    await check(case, virtual_clock)
