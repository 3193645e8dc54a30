"""A repository of models that add a number, and cores that serve it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array, decode, encode
from weft.serving.backends.base import TensorBackend
from weft.serving.core import ServingCore

CONFIG = """\
backend: "add"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


class Add(TensorBackend):
    """Y = X + the number in the version's file ``value``."""

    def load(self) -> None:
        """Read the number."""
        try:
            self.value = np.float32((self.model.directory / "value").read_text())
        except ValueError:
            raise InvalidArgumentError("file 'value' has no number") from None

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Add."""
        return {"Y": inputs["X"] + self.value}


class Gate:
    """Backends whose load or run waits until a test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.num_inside = 0
        self.most_inside = 0
        self.num_closed = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Count, wait for the test, count."""
        with self._lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.entered.release()
        assert self.is_open.wait(10)
        with self._lock:
            self.num_inside -= 1

    def on_run(self) -> type[Add]:
        """A backend that waits in every run."""
        gate = self

        class SlowRun(Add):
            def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
                gate.wait()
                return super().run(inputs, num_rows)

            def close(self) -> None:
                gate.num_closed += 1

        return SlowRun

    def on_load(self) -> type[Add]:
        """A backend that waits in every load."""
        gate = self

        class SlowLoad(Add):
            def load(self) -> None:
                gate.wait()
                super().load()

        return SlowLoad

    async def has_entered(self) -> None:
        """A backend waits inside."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=10)


class Repository:
    """A folder of models, and the cores that serve it."""

    CONFIG = CONFIG
    BACKEND = Add

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cores: list[ServingCore] = []

    def write(self, name: str, values: dict[int, object], config: str = CONFIG) -> None:
        """A model whose versions add these values."""
        for version, value in values.items():
            (self.root / name / str(version)).mkdir(parents=True, exist_ok=True)
            (self.root / name / str(version) / "value").write_text(str(value))
        (self.root / name / "config.pbtxt").write_text(config)

    def core(self, backend: type[Add] = Add, **options: Any) -> ServingCore:
        """A core in explicit mode; closed after the test."""
        core = ServingCore(self.root, {"add": backend}, **{"model_control": "explicit", "num_gpus": 0, **options})
        self.cores.append(core)
        return core

    async def serve(self, backend: type[Add] = Add, **options: Any) -> ServingCore:
        """A core that has loaded every model."""
        core = self.core(backend, **{"load_models": ["*"], **options})
        await core.start()
        return core

    async def infer(
        self, core: ServingCore, name: str = "m", version: str = "", *, deadline_ns: int | None = None
    ) -> float:
        """First element of Y for X = 0."""
        call = InferCall(name, version, inputs={"X": encode(np.zeros((1, 2), np.float32))})
        context = CallContext(deadline_ns=deadline_ns)
        return float(decode((await core.infer(call, context)).outputs["Y"])[0, 0])


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[Repository]:
    """An empty repository."""
    repository = Repository(tmp_path)
    yield repository
    for core in repository.cores:
        await core.close(grace_s=5)


@pytest.fixture
def gate() -> Gate:
    """A closed gate."""
    return Gate()
