"""What a mesh that did not come up is told to have died of."""

from pathlib import Path

import pytest

from weft.mesh.running import last_error


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            '{"level": "info", "message": "a"}\n{"level": "error", "message": "no weights"}\n'
            '{"service": "weft", "level": "error", "message": "ended"}\n',
            "no weights",
        ),
        ("weft: 'x' is no repository\nweft: give one\n", "'x' is no repository; give one"),
        ("", "it logged nothing"),
        ('[1]\n{"level": "error"', '{"level": "error"'),
    ],
)
def test_the_error_is_what_the_log_says(tmp_path: Path, log: str, reason: str) -> None:
    """The last error of a service before anything else, and nothing from before the offset."""
    before = '{"level": "error", "message": "of an earlier mesh"}\n'
    (tmp_path / "log").write_text(before + log)
    assert last_error(tmp_path / "log", len(before)) == reason
