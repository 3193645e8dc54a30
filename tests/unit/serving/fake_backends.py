"""Backends on purpose: one that echoes, one that waits for a gate, and those that do what no model should."""

import asyncio
import math
import threading
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import Backend, Batch, TensorBackend
from weft.serving.request.request import InferenceResponse, Outcome

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


class Bad(Echo):
    """Does something wrong with the first member of a batch, or with all of it."""

    is_repeatable = False

    def execute(self, batch: Batch) -> list[Outcome]:
        outcomes = super().execute(batch)
        assert isinstance(outcomes[0], InferenceResponse)
        self.spoil(outcomes[0].outputs, outcomes)
        return outcomes

    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        raise NotImplementedError


class Raises(Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise ValueError("secret of the model")


class Exits(Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise SystemExit(3)


class RaisesOwnError(Bad):
    def execute(self, batch: Batch) -> list[Outcome]:
        raise InvalidArgumentError("the model wants other text")


class Poisoned(Bad):
    """Fails a batch that has the number 13 in it, and counts the batches."""

    num_executed = 0

    def execute(self, batch: Batch) -> list[Outcome]:
        type(self).num_executed += 1
        if any(13 in request.array("IN") for request in batch.requests):
            raise ValueError("unlucky")
        return Echo.execute(self, batch)


class NoList(Bad):
    def execute(self, batch: Batch) -> Any:
        return None


class TooFewOutcomes(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes.pop()


class TooManyOutcomes(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes.append(outcomes[0])


class NoOutcome(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Any]) -> None:
        outcomes[0] = None


class WrongShape(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"][:, :0]


class WrongRows(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["OUT"] = np.concatenate([outputs["OUT"], outputs["OUT"]])


class WrongDatatype(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"].astype(np.float64)


class ComplexDatatype(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["COUNT"] = outputs["COUNT"].astype(np.complex64)


class NoArray(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["OUT"] = [1.0]


class UnknownOutput(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outputs["TYPO"] = outputs["OUT"]


class MissingOutput(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        del outputs["COUNT"]


class FailsFirst(Bad):
    def spoil(self, outputs: dict[str, Any], outcomes: list[Outcome]) -> None:
        outcomes[0] = InvalidArgumentError("not this one")


class CannotLoad(Echo):
    def load(self) -> None:
        raise OSError("weights.bin is not there")


class CannotClose(Echo):
    def close(self) -> None:
        raise RuntimeError("close fails")
