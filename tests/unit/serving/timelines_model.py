"""A served model whose executions wait at a gate, and the scripts of ``timelines/models.txt``."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.case_files import Case, literals
from tests.unit.serving import fake_backends
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import TIMEOUT_S

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.signature import ModelSignature
from weft.base.tensors import decode, encode
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceRequest, Outcome
from weft.serving.runtime.model import ServedModel

MS = 1_000_000


class Held:
    """Holds the executions of a backend, by the first member of the batch, and knows what was executed."""

    def __init__(self, base: type[Backend], **attributes: Any) -> None:
        self.batches: list[list[str]] = []
        self.running: list[InferenceRequest] = []
        self.closed = 0
        self.begun = threading.Semaphore(0)
        self._changed = threading.Condition()
        self._released: set[str] = set()
        held = self

        class Gated(base):  # type: ignore[misc, valid-type]
            def execute(self, batch: Batch) -> list[Outcome]:
                names = [request.call.request_id for request in batch.requests]
                held.batches.append(names)
                held.running += batch.requests
                held.begun.release()
                with held._changed:
                    assert held._changed.wait_for(lambda: {names[0], "all"} & held._released, TIMEOUT_S)
                held.running = [request for request in held.running if request not in batch.requests]
                return super().execute(batch)

            def close(self) -> None:
                held.closed += 1

        self.backend = type("Gated", (Gated,), attributes)

    def release(self, *names: str) -> None:
        with self._changed:
            self._released.update(names)
            self._changed.notify_all()


class ModelTimeline:
    """A model, and its requests by number."""

    def __init__(self, case: Case, signature: ModelSignature, monkeypatch: pytest.MonkeyPatch) -> None:
        names = dict(case.options)
        monkeypatch.setenv("WEFT_DELAY_SCHEDULER", case.option("hold", "0"))
        attributes = {"is_repeatable": True} if "repeatable" in names else {}
        self.held = Held(getattr(fake_backends, case.option("backend", "Echo")), **attributes)
        signature = replace(signature, allows_empty_batch="empty" in names)
        policy = WaitPolicy(**literals(case.option("policy")))
        settings = SchedulerSettings(8, default_policy=policy, **literals(case.option("set")))
        places = [
            InstanceContext(f"echo_{i}", is_inline="inline" in names) for i in range(int(names.get("instances", 1)))
        ]
        context = ModelContext(signature, Path("/nonexistent"), {}, {})
        self.model = ServedModel(context, self.held.backend, settings, places)
        self.tasks: dict[str, asyncio.Task[InferResult]] = {}
        self.left: list[str] = []
        self.executed = asyncio.Semaphore(0)
        self._count_executions()

    def _count_executions(self) -> None:
        count = self.model.recorder.executed

        def executed(*args: Any) -> None:
            count(*args)
            self.executed.release()

        self.model.recorder.executed = executed  # type: ignore[assignment, method-assign]

    async def run(self, line: str) -> list[str]:
        """What the commands of a line say."""
        found = []
        for command in line.split(", "):
            name, *words = command.split()
            async with asyncio.timeout(TIMEOUT_S):
                said = getattr(self, name)(*words)
                if hasattr(said, "__aiter__"):
                    found += [each async for each in said]
                else:
                    await said
        return found

    async def ask(self, *words: str) -> None:
        fields = literals(" ".join(word for word in words if "=" in word))
        deadline_ms, is_counting = fields.pop("deadline_ms", None), fields.pop("counting", False)
        for name in (word for word in words if "=" not in word):
            call: InferCall = replace(make_call(int(name), **fields), request_id=name)
            if is_counting:
                call.inputs = {"IN": encode(np.arange(fields["rows"] * 2, dtype=np.float32).reshape(-1, 2) // 2)}
            deadline_ns = None if deadline_ms is None else time.monotonic_ns() + deadline_ms * MS
            task = asyncio.create_task(self.model.infer(call, CallContext(deadline_ns=deadline_ns)))
            task.add_done_callback(lambda _, name=name: self.left.append(name))
            self.tasks[name] = task
        await asyncio.sleep(0)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.held.begun.acquire, timeout=TIMEOUT_S)

    async def ended(self) -> None:
        await self.executed.acquire()
        await asyncio.sleep(0)

    async def open(self) -> None:
        self.held.release("all")

    async def release(self, *names: str) -> None:
        self.held.release(*names)

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])

    async def answer(self, name: str) -> AsyncIterator[str]:
        (outcome,) = await asyncio.gather(self.tasks.pop(name), return_exceptions=True)
        yield f"{name}: {shown(outcome)}"

    async def answers(self) -> AsyncIterator[str]:
        for name in list(self.tasks):
            async for line in self.answer(name):
                yield line

    async def order(self) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        yield " ".join(self.left) or "none has left"

    async def told(self) -> AsyncIterator[str]:
        yield " ".join(request.call.request_id for request in self.held.running if request.is_cancelled) or "nobody"

    async def batches(self) -> AsyncIterator[str]:
        yield " | ".join(" ".join(names) for names in self.held.batches) or "none"

    async def counts(self) -> AsyncIterator[str]:
        counts = self.model.statistics
        sizes = {size: batch.compute_infer.count for size, batch in counts.batches.items()}
        yield f"{counts.success.count} answered, {counts.inference_count} rows, {counts.execution_count} executions"
        yield f"executions by rows {sizes}, failures {counts.failures_by_reason}, {counts.pending_count} wait"

    async def stop(self, grace_s: str) -> None:
        self.stopping = asyncio.create_task(self.model.stop(grace_s=float(grace_s)))
        await asyncio.sleep(0)

    async def stopped(self) -> None:
        await self.stopping

    async def closed(self, at_least: str = "0") -> AsyncIterator[str]:
        while self.held.closed < int(at_least):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)
        yield f"closed {self.held.closed} times"


def shown(outcome: InferResult | BaseException) -> str:
    """An answer as text, without times and ids of errors."""
    if isinstance(outcome, asyncio.CancelledError):
        return "cancelled"
    if isinstance(outcome, InferResult):
        assert "1" == outcome.model_version
        values = {name: decode(tensor)[:, 0].tolist() for name, tensor in outcome.outputs.items()}
        words = {"OUT": "says", "COUNT": "in batches of"}
        return " ".join(f"{words[name]} {', '.join(_repeated(column)) or 'nothing'}" for name, column in values.items())
    message = re.sub(r"[\d.]+ ms", "T ms", re.sub(r"error id \w+", "error id E", str(outcome)))
    hint = " (with a hint when to come again)" if getattr(outcome, "retry_after_ms", 0) else ""
    return f"{type(outcome).__name__}: {message}{hint}"


def _repeated(values: list[float]) -> Iterator[str]:
    start = 0
    for i, value in enumerate(values):
        if i + 1 == len(values) or values[i + 1] != value:
            yield f"{value:g}" + (f" x{i + 1 - start}" if i > start else "")
            start = i + 1
