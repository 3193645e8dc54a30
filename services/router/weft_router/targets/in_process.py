"""A target in the router's own process: no socket, no serialization."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from weft_common.core import CallContext, InferCall, InferenceCore, InferResult
from weft_common.errors import DeadlineExceededError, WeftError
from weft_common.signature import ModelSignature
from weft_router.targets.target import TargetModel


class InProcessTarget:
    """A target over any ``InferenceCore``; whoever made the core closes it.

    Args:
        name: As given to the router.
        core: Answers the calls.
        clock_ns: What deadlines are measured on, that of the runtime.
    """

    def __init__(self, name: str, core: InferenceCore, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.name = name
        self.address = "in-process"
        self._core = core
        self._clock_ns = clock_ns

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``."""
        if context.deadline_ns is None:
            return await self._core.infer(call, context)
        remaining_s = self._remaining_s(context.deadline_ns)
        try:
            async with asyncio.timeout(remaining_s):
                if remaining_s > 0:
                    return await self._core.infer(call, context)
        except TimeoutError:
            pass
        raise self._late(call, remaining_s)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``."""
        deadline_ns = context.deadline_ns
        given_s = 0.0 if deadline_ns is None else self._remaining_s(deadline_ns)
        async with contextlib.aclosing(self._core.stream_infer(call, context)) as results:
            while True:
                remaining_s = None if deadline_ns is None else self._remaining_s(deadline_ns)
                if remaining_s == 0:
                    raise self._late(call, given_s)
                try:
                    async with asyncio.timeout(remaining_s):
                        result = await anext(results)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._late(call, given_s) from None
                yield result

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """As ``Target.discover``; answers at once."""
        models: list[TargetModel] = []
        for entry in self._core.index(ready_only=False):
            try:
                config = self._core.config(entry.name, entry.version)
            except WeftError:
                continue  # listed, but it failed to load
            models.append(
                TargetModel(ModelSignature.from_config(config, entry.version), entry.state == "READY", config)
            )
        return models

    async def close(self) -> None:
        """As ``Target.close``; there is no transport."""

    def _late(self, call: InferCall, remaining_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"model '{call.model_name}' on target '{self.name}' did not answer within the "
            f"{remaining_s * 1e3:.0f} ms that were left"
        )

    def _remaining_s(self, deadline_ns: int) -> float:
        return max((deadline_ns - self._clock_ns()) / 1e9, 0.0)
