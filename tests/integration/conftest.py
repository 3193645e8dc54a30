"""The sample repository."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The sample repository, built."""
    return Path(__file__).resolve().parents[2] / "model_repository"
