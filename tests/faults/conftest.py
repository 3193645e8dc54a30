"""What the faults cost: one table at the end of the run, and JSON where WEFT_FAULT_REPORT says."""

import json
import os
from pathlib import Path

import pytest
from benchmarks import machine
from benchmarks.report import machine_lines, table
from tests.faults.scenarios import Outcome

OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> dict[str, Outcome]:
    """What was seen, by fault."""
    return pytestconfig.stash.setdefault(OUTCOMES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    outcomes = config.stash.get(OUTCOMES, {})
    if not outcomes:
        return
    lines = [["fault", "sent", "right", "refused", "wrong", "lost", "twice", "failing s", "recover s"]]
    lines += [
        [name, *map(str, outcome[:6]), f"{outcome.disturbed_s:.2f}", f"{outcome.recover_s:.2f}"]
        for name, outcome in outcomes.items()
    ]
    described = machine.describe()
    terminalreporter.write_line("\n".join(["", *machine_lines(described), table(lines, left_columns=(0,))]))
    if report := os.environ.get("WEFT_FAULT_REPORT"):
        found = {name: outcome._asdict() for name, outcome in outcomes.items()}
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).write_text(json.dumps({"machine": described, "faults": found}, indent=1))
