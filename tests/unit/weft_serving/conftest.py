"""Models on purpose: one that echoes, one that waits for a gate, and those that do what no model should."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft_common.core import CallContext, InferCall, RequestedOutput
from weft_common.errors import InvalidArgumentError
from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import encode
from weft_serving.backends.base import Backend, Batch, InstanceContext, ModelContext, TensorBackend
from weft_serving.request.request import InferenceRequest, InferenceResponse, Outcome
from weft_serving.scheduler.settings import SchedulerSettings
from weft_serving.served.model import ServedModel

TIMEOUT_S = 10.0


class Echo(TensorBackend):
    """OUT is IN, and COUNT the number of rows of the batch, in each row."""

    def load(self) -> None:
        pass

    def run(self, inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
        return {"OUT": inputs["IN"], "COUNT": np.full((num_rows, 1), num_rows, np.int32)}


class Gate:
    """Holds every execution of its backend until it is opened, and tells what was executed."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.closed = 0
        self._entered = threading.Semaphore(0)
        self._changed = threading.Condition()
        self._num_open = 0.0
        gate = self

        class Gated(Echo):
            def execute(self, batch: Batch) -> list[Outcome]:
                gate.batches.append([float(request.array("IN")[0, 0]) for request in batch.requests])
                gate._entered.release()
                gate._pass()
                return super().execute(batch)

            def close(self) -> None:
                gate.closed += 1

        self.backend: type[Backend] = Gated

    async def entered(self) -> None:
        """An execution, beside those awaited before, waits at the gate or has passed it."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=TIMEOUT_S)

    def open(self, num_executions: float = math.inf) -> None:
        """Let that many executions pass."""
        with self._changed:
            self._num_open += num_executions
            self._changed.notify_all()

    def _pass(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_open > 0, TIMEOUT_S)
            self._num_open -= 1


class _Bad(Echo):
    """Does something wrong with the first member of a batch, or with all of it."""

    is_repeatable = False

    def execute(self, batch: Batch) -> list[Outcome]:
        outcomes = super().execute(batch)
        assert isinstance(outcomes[0], InferenceResponse)
        self.spoil(outcomes[0].outputs, outcomes)
        return outcomes

    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        raise NotImplementedError


class Raises(_Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise ValueError("secret of the model")


class Exits(_Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise SystemExit(3)


class RaisesOwnError(_Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise InvalidArgumentError("the model wants other text")


class Poisoned(_Bad):
    """Fails a batch that has the number 13 in it, and counts the batches."""

    num_executed = 0

    def execute(self, batch: Batch) -> list[Outcome]:
        type(self).num_executed += 1
        if any(13 in request.array("IN") for request in batch.requests):
            raise ValueError("unlucky")
        return Echo.execute(self, batch)


class NoList(_Bad):
    def execute(self, batch: Batch) -> Any:
        return None


class TooFewOutcomes(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes.pop()


class TooManyOutcomes(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes.append(outcomes[0])


class NoOutcome(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Any]) -> None:
        outcomes[0] = None


class WrongShape(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"][:, :0]


class WrongRows(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["OUT"] = np.concatenate([outputs["OUT"], outputs["OUT"]])


class WrongDatatype(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"].astype(np.float64)


class ComplexDatatype(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"].astype(np.complex64)


class NoArray(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["OUT"] = [1.0]


class UnknownOutput(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["TYPO"] = outputs["OUT"]


class MissingOutput(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        del outputs["COUNT"]


class FailsFirst(_Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes[0] = InvalidArgumentError("not this one")


class CannotLoad(Echo):
    def load(self) -> None:
        raise OSError("weights.bin is not there")


class CannotClose(Echo):
    def close(self) -> None:
        raise RuntimeError("close fails")


@pytest.fixture
def backends() -> SimpleNamespace:
    """Backends by class name: ``Echo``, and the deliberately bad ones."""
    return SimpleNamespace(**{cls.__name__: cls for cls in (Echo, CannotLoad, CannotClose, *_Bad.__subclasses__())})


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
    """Starts a model of a backend, ``num_instances`` and scheduler settings; it is stopped after the test."""
    models: list[ServedModel] = []

    async def start(backend: type[Backend], *, num_instances: int = 1, **settings: Any) -> ServedModel:
        places = [InstanceContext(f"echo_{i}") for i in range(num_instances)]
        model = ServedModel(model_context, backend, SchedulerSettings(**{"max_batch_size": 8, **settings}), places)
        models.append(model)
        await model.start()
        return model

    yield start
    gate.open()
    for model in models:
        await model.stop(grace_s=TIMEOUT_S)


@pytest.fixture
def make_call() -> Callable[..., InferCall]:
    """``make_call(value, rows=1, columns=2, outputs=(), **parameters)``: IN is filled with ``value``."""

    def make(value: float = 0, rows: int = 1, columns: int = 2, outputs: Any = (), **parameters: Any) -> InferCall:
        return InferCall(
            "echo",
            request_id=f"r{value}",
            parameters=parameters,
            inputs={"IN": encode(np.full((rows, columns), value, np.float32))},
            outputs=tuple(RequestedOutput(name, {}) for name in outputs),
        )

    return make


@pytest.fixture
def make_request() -> Callable[..., InferenceRequest]:
    """``make_request(rows=1, priority=0, timeout_us=0, deadline_ns=None, key=None)`` for queue and batcher."""

    def make(
        rows: int = 1, priority: int = 0, timeout_us: int = 0, deadline_ns: int | None = None, key: object = None
    ) -> InferenceRequest:
        context = CallContext(deadline_ns=deadline_ns)
        return InferenceRequest(InferCall("m"), context, rows, priority, timeout_us, batch_key=key)

    return make
