"""What becomes of requests, by kept cases: see ``graph_cases.py`` for the form of the files under ``cases/``."""

from pathlib import Path

from tests.case_files import Case, cases
from tests.unit.router.graph_cases import check
from tests.unit.router.virtual_clock import VirtualClock


@cases(*Path(__file__).parent.glob("cases/*.txt"))
async def test_a_graph_answers(virtual_clock: VirtualClock, case: Case) -> None:
    """As the graph says, over models that answer as the case says; no call and no task is left behind."""
    await check(case, virtual_clock)
