"""Models of the ``python`` backend whose ``execute`` is a function of the test."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.serving.python.python_models import SOURCE, Execute

from weft.base.signature import ModelSignature, TensorSpec
from weft.serving.backends.base import InstanceContext, ModelCaller, ModelContext
from weft.serving.backends.python import PythonBackend
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.runtime.model import ServedModel


@pytest.fixture
async def serve_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Starts a model of an ``execute(requests, pb_utils)``: IN FP32 [-1] to OUT FP32 [-1], batches of up to 8 rows."""
    models: list[ServedModel] = []

    async def start(
        execute: Execute,
        *,
        is_decoupled: bool = True,
        num_instances: int = 1,
        is_inline: bool = False,
        source: str = SOURCE,
        caller: ModelCaller | None = None,
        parameters: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> ServedModel:
        folder = tmp_path / "m" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(source)
        module = ModuleType("model_under_test")
        module.__dict__["execute"] = execute
        monkeypatch.setitem(sys.modules, module.__name__, module)
        tensors = (TensorSpec("IN", "FP32", (-1,)),), (TensorSpec("OUT", "FP32", (-1,)),)
        signature = ModelSignature("m", "1", "python", 8, *tensors, is_decoupled=is_decoupled)
        context = ModelContext(signature, folder, {"name": "m"}, parameters or {}, caller=caller)
        places = [InstanceContext(f"m_{i}", is_inline=is_inline) for i in range(num_instances)]
        model = ServedModel(context, PythonBackend, SchedulerSettings(**{"max_batch_size": 8, **settings}), places)
        models.append(model)
        await model.start()
        return model

    yield start
    for model in models:
        await model.stop(grace_s=0.0)
