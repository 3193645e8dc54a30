"""The second try that tests have in continuous integration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWICE = Path(__file__).parents[3] / ".ci" / "twice"

#: Each run of a test adds its name to a file; ``flaky`` fails or ends the process, as asked, until it is in there.
TESTS = """
import os
from pathlib import Path

def note(name):
    with Path("log").open("a") as log:
        log.write(name + " ")
    return Path("log").read_text().split().count(name)

def test_steady():
    note("steady")

def test_flaky():
    num_runs = note("flaky")
    {flaw}
"""


@pytest.mark.parametrize(
    ("flaw", "status", "log"),
    [
        ("assert num_runs > 1", 0, "steady flaky flaky"),
        ("assert num_runs > 2", 1, "steady flaky flaky"),
        ("num_runs > 1 or os._exit(1)", 0, "steady flaky steady flaky"),
    ],
    ids=["fails once", "fails twice", "crashes"],
)
def test_what_failed_runs_again_alone_and_what_crashed_as_a_whole(
    tmp_path: Path, flaw: str, status: int, log: str
) -> None:
    """A test that fails twice fails the run, and one that fails once does not; a run without a record is repeated."""
    (tmp_path / "test_some.py").write_text(TESTS.format(flaw=flaw))
    command = [str(TWICE), sys.executable, "-m", "pytest", "-p", "xdist"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, (tmp_path / "log").read_text().split()) == (status, log.split()), ended.stdout
