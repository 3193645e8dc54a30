"""Outputs as text: graphs, what their models do, and what comes of requests; see tests/unit/router/scenes.py."""

from pathlib import Path

import pytest
from tests.unit.case_files import Case, cases
from tests.unit.router.scenes import played


@pytest.mark.parametrize("case", cases((Path(__file__).parent / "scenes").glob("*.txt")))
async def test_a_scene(case: Case) -> None:
    """All that comes of a scene is what is written below it, and nothing is left in work."""
    case.check(await played(case.given))
