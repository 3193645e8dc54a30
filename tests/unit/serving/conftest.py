"""A model that echoes, and a gate that holds it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serving.fake_backends import TIMEOUT_S, Gate

from weft.base.signature import ModelSignature, TensorSpec
from weft.serving.backends.base import Backend, InstanceContext, ModelContext
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.runtime.model import ServedModel


@pytest.fixture
def gate() -> Gate:
    """A gate that is closed; ``gate.backend`` is the backend behind it."""
    return Gate()


@pytest.fixture
def signature() -> ModelSignature:
    """IN FP32 [-1] to OUT FP32 [-1] and COUNT INT32 [1], batches of up to 8 rows."""
    return ModelSignature(
        "echo",
        "1",
        "test",
        8,
        (TensorSpec("IN", "FP32", (-1,)),),
        (TensorSpec("OUT", "FP32", (-1,)), TensorSpec("COUNT", "INT32", (1,))),
    )


@pytest.fixture
def model_context(signature: ModelSignature) -> ModelContext:
    """The model version of ``signature``."""
    return ModelContext(signature, Path("/nonexistent"), {}, {})


@pytest.fixture
async def serve(model_context: ModelContext, gate: Gate) -> AsyncIterator[Callable[..., Any]]:
    """Starts a model of a backend, its instances and scheduler settings; it is stopped after the test."""
    models: list[ServedModel] = []

    async def start(
        backend: type[Backend], *, num_instances: int = 1, is_inline: bool = False, **settings: Any
    ) -> ServedModel:
        places = [InstanceContext(f"echo_{i}", is_inline=is_inline) for i in range(num_instances)]
        model = ServedModel(model_context, backend, SchedulerSettings(**{"max_batch_size": 8, **settings}), places)
        models.append(model)
        await model.start()
        return model

    yield start
    gate.open()
    for model in models:
        await model.stop(grace_s=TIMEOUT_S)
