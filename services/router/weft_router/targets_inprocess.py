"""A target in the router's own process: no socket, no serialization."""

import asyncio
import time

from weft_common.core import CallContext, InferCall, InferenceCore, InferResult
from weft_common.errors import DeadlineExceededError, WeftError
from weft_common.signature import ModelSignature
from weft_router.targets import TargetModel


class InProcessTarget:
    """A target over any ``InferenceCore``; whoever made the core closes it.

    Args:
        name: As given to the router.
        core: Answers the calls.
    """

    def __init__(self, name: str, core: InferenceCore) -> None:
        self.name = name
        self.address = "in-process"
        self._core = core

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``."""
        if context.deadline_ns is None:
            return await self._core.infer(call, context)
        remaining_s = (context.deadline_ns - time.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout(max(remaining_s, 0.0)):
                if remaining_s > 0:
                    return await self._core.infer(call, context)
        except TimeoutError:
            pass
        raise DeadlineExceededError(
            f"model '{call.model_name}' on target '{self.name}' did not answer within the "
            f"{max(remaining_s, 0.0) * 1e3:.0f} ms that were left"
        )

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
