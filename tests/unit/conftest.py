"""A folder for a model, and its context."""

import functools
from pathlib import Path

import pytest
from tests.unit.builders import MakeModelContext, model_context


@pytest.fixture
def version_folder(tmp_path: Path) -> Path:
    """An empty version folder ``<model>/1``."""
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def make_model_context(version_folder: Path) -> MakeModelContext:
    """Makes the context of a model in ``version_folder``."""
    return functools.partial(model_context, directory=version_folder)
