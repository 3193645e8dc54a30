"""examples/distil.py: from a teacher's answers to a student and a cascade of both, over real meshes."""

from pathlib import Path

import pytest
from examples.distil import CASCADE, MIN_AGREEMENT, STUDENT, TEACHER, distil

pytestmark = pytest.mark.long


def test_a_cascade_answers_like_the_teacher_and_seldom_asks_it(tmp_path: Path) -> None:
    """The student differs now and then, the cascade hardly ever, though a small part of the pictures goes on."""
    distilled = distil(tmp_path / "repository", num_repeats=1)
    student, cascade = distilled.figures[STUDENT], distilled.figures[CASCADE]
    assert distilled.figures[TEACHER].agreement == 1.0
    assert 0.95 < student.agreement < cascade.agreement
    assert cascade.agreement >= MIN_AGREEMENT - 0.01
    assert cascade.accuracy > student.accuracy
    assert 0.0 < distilled.share_of_teacher < 0.2
    assert 0.0 < distilled.threshold < 1.0
