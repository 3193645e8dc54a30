"""Runs Python of case files as a user's file."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.authoring.models import Models
from weft.testing.plugin import weft_model  # noqa: F401  # a fixture

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def models() -> Models:
    """The sample repository, by its signatures."""
    return weft.models(ROOT / "model_repository")


@pytest.fixture
def run(tmp_path: Path, models: Models) -> Callable[[str], dict[str, Any]]:
    """Run Python as the file ``case.py``, with the public names and ``m``, the models; returns its names."""

    def execute(text: str) -> dict[str, Any]:
        file = tmp_path / "case.py"
        text = textwrap.dedent(text)
        file.write_text(text)
        names = {"weft": weft, "m": models, **{name: getattr(weft, name) for name in weft.__all__}}
        exec(compile(text, str(file), "exec"), names)
        return names

    return execute
