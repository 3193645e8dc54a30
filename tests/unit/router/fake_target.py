"""A target that answers as a test says, and its answers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from tests.unit.router.virtual_clock import virtual_clock_of_loop

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.tensors import WireTensor, encode
from weft.router.target import TargetModel

Answer = Callable[[InferCall, CallContext], Awaitable[Mapping[str, WireTensor] | InferResult]]


def answering(*values: float, after_ms: float = 0, **parameters: Any) -> Answer:
    """A script: after a while the first input, or `values`, as every requested output, with response parameters."""

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        value = encode(np.asarray(values, np.float32)) if values else next(iter(call.inputs.values()))
        outputs = {output.name: value for output in call.outputs}
        return InferResult(call.model_name, call.model_version or "1", call.request_id, parameters, outputs)

    return answer


def failing(
    code: str = "UNAVAILABLE", message: str = "gone", *, after_ms: float = 0, retry_after_ms: int | None = None
) -> Answer:
    """A script: after a while an error."""

    async def fail(call: InferCall, context: CallContext) -> InferResult:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        raise RemoteError(code, message, retry_after_ms=retry_after_ms)

    return fail


def in_turn(*answers: Answer) -> Answer:
    """A script that answers the first call as the first of `answers` says, and so on; the last one repeats."""
    rest = list(answers)

    async def answer(call: InferCall, context: CallContext) -> Any:
        return await (rest.pop(0) if len(rest) > 1 else rest[0])(call, context)

    return answer


class FakeTarget:
    """Answers each model as scripted; a model without a script echoes its first input as every requested output.

    `calls` and `contexts` have what came in; `cancelled` the models whose call was cancelled; `num_open` is the number
    of calls in work. Deadlines are kept on a virtual clock only.
    """

    def __init__(self, name: str = "model", /, **answers: Answer) -> None:
        self.name = name
        self.address = "fake:1"
        self.answers: dict[str, Answer] = dict(answers)
        self.calls: list[InferCall] = []
        self.contexts: list[CallContext] = []
        self.cancelled: list[str] = []
        self.num_open = 0
        self.models: Any = []  # or the error that `discover` raises
        self.num_discoveries = 0
        self.discovered = asyncio.Event()
        self.is_closed = False

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.calls.append(call)
        self.contexts.append(context)
        self.num_open += 1
        try:
            if call.model_name in self.answers:
                answer = await self._by_deadline(self.answers[call.model_name](call, context), call, context)
                if isinstance(answer, InferResult):
                    return answer
            else:
                answer = {output.name: next(iter(call.inputs.values())) for output in call.outputs}
        except asyncio.CancelledError:
            self.cancelled.append(call.model_name)
            raise
        finally:
            self.num_open -= 1
        return InferResult(call.model_name, call.model_version or "1", call.request_id, {}, dict(answer))

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        raise NotImplementedError

    async def _by_deadline(self, answer: Awaitable[Any], call: InferCall, context: CallContext) -> Any:
        clock_ns = virtual_clock_of_loop()
        if clock_ns is None or context.deadline_ns is None:
            return await answer
        left_ms = max((context.deadline_ns - clock_ns()) / 1e6, 0)
        try:
            async with asyncio.timeout(left_ms / 1e3):
                return await answer
        except TimeoutError:
            raise RemoteError("DEADLINE_EXCEEDED", f"no answer of '{call.model_name}' in {left_ms:.0f} ms") from None

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        self.num_discoveries += 1
        self.discovered.set()
        if isinstance(self.models, Exception):
            raise self.models
        return list(self.models)

    async def close(self) -> None:
        self.is_closed = True

    def called(self) -> list[str]:
        """Model names in the order of their calls."""
        return [call.model_name for call in self.calls]
