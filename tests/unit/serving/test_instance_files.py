"""A model whose files the service may not read says so, whatever its backend makes of it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.serving.fake_backends import Echo

from weft.base.errors import InternalError, InvalidArgumentError, NotFoundError, WeftError
from weft.serving.backends.base import InstanceContext
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.runtime.model import ServedModel


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version folder with a file that its owner alone can read, as seen by another user."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    file.chmod(0o600)
    real = os.access

    def access(path: Path, mode: int) -> bool:
        return real(path, mode) and path.stat().st_mode & 0o004 != 0

    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "access", access)
    return tmp_path


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(NotFoundError("No such file or directory"), InvalidArgumentError), (OSError(2, "No such file"), InternalError)],
    ids=["an error of the backend", "any other"],
)
async def test_a_file_that_cannot_be_read_is_the_reason(
    model_context, directory: Path, raised: Exception, expected: type[WeftError]
) -> None:
    """Path, mode, both users and the cure are in the message, in place of a missing file."""

    class Unreadable(Echo):
        def load(self) -> None:
            raise raised

    context = replace(model_context, directory=directory)
    model = ServedModel(context, Unreadable, SchedulerSettings(8), [InstanceContext("echo_0")])
    with pytest.raises(expected, match=rf"permission denied: .*model.safetensors has mode 0600 .* user {os.geteuid()}"):
        await model.start()
    (directory / "model.safetensors").chmod(0o644)
    with pytest.raises(WeftError, match="No such file"):
        await ServedModel(context, Unreadable, SchedulerSettings(8), [InstanceContext("echo_0")]).start()
