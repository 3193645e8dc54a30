"""Graphs as text, what their models do, and what comes of requests: the scenes that ``scenes.py`` plays."""

from pathlib import Path

from tests.case_files import Case, cases
from tests.unit.router.scenes import played


@cases(*Path(__file__).parent.glob("*/scenes/*.txt"))
async def test_a_scene(case: Case) -> None:
    """All that comes of a scene is what is written below it, and nothing is left in work."""
    case.check(await played(case.text))
