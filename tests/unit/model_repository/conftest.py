"""The build's own modules are importable, as they are for ``python model_repository/build.py``."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3] / "model_repository"
sys.path.insert(0, str(REPOSITORY))


@pytest.fixture
def repository() -> Path:
    """The committed model repository; its built files may be missing."""
    return REPOSITORY
