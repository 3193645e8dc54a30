"""docs/python.md, followed from its first block to its last."""

from pathlib import Path

from tests.guide import follow, steps_of

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_guide_is_true(tmp_path: Path) -> None:
    """Every file, session and command, with what is shown of its output."""
    assert {step.kind for step in steps_of(PAGE.read_text())} == {"file", "session", "command"}
    follow(PAGE, tmp_path, skipped=("pip install",))
