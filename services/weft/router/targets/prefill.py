"""Prefill apart from decode: which requests are split, and the calls that they become. ``SplitCall``."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from weft.base.cancellation import cancel_and_wait
from weft.base.core import InferCall, InferResult
from weft.router.targets.replicas import Replica
from weft.v2.protocol.handover import DEFAULT_MIN_TOKENS, HANDOVER, LEASE, MIN_TOKENS, SOURCE, signed_source

#: A replica that has so many prompts to compute, or blocks to hand over, gets no more: the others compute theirs.
MAX_PROMPTS = 8
#: Bytes of text that count as one token, and of a token id.
_TOKEN_BYTES = 4
_IDS, _TEXT, _STREAM = "input_ids", "text_input", "stream"


def is_split(replica: Replica, call: InferCall) -> bool:
    """Whether the prompt of a call is computed at ``replica``: a long one, of a stream, while there are few others."""
    stream = call.inputs.get(_STREAM)
    prompt = call.inputs.get(_IDS) or call.inputs.get(_TEXT)
    if stream is None or prompt is None or stream.data != b"\1" or replica.num_inflight >= MAX_PROMPTS:
        return False
    text = parameter_of(replica, call.model_name, call.model_version, MIN_TOKENS)
    return len(prompt.data) >= _TOKEN_BYTES * (int(text) if text.isdecimal() else DEFAULT_MIN_TOKENS)


def parameter_of(replica: Replica, name: str, version: str, parameter: str) -> str:
    """A parameter of a model's configuration at a replica; "": there is none."""
    for model in replica.versions_of(name, version):
        parameters = {} if model.config is None else model.config.parameters
        if parameter in parameters:
            return parameters[parameter].string_value
    return ""


class SplitCall:
    """One request whose prompt another replica computes; or none, if there is no such replica.

    The call of that replica is read until it ends, so that its lease ends with it or when this request does.
    """

    def __init__(self, replica: Replica | None, key: str) -> None:
        self.replica = replica
        self._key = key
        self._source = ""
        self._is_handed_over = False
        self._held: AsyncGenerator[InferResult, None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def call_for(self, replica: Replica, call: InferCall) -> InferCall:
        """The call to send to a replica: asks the first to hand over, tells the next one once where blocks are."""
        if self.replica is None or (self._is_handed_over and not self._source):
            return call
        if not self._is_handed_over:
            return replace(call, parameters={**call.parameters, LEASE: True}) if replica is self.replica else call
        source, self._source = signed_source(self._key, self.replica.address, self._source), ""
        return replace(call, parameters={**call.parameters, SOURCE: source})

    def take(self, result: InferResult) -> bool:
        """Take the handover out of a response; returns whether there was one."""
        if self.replica is None or self._is_handed_over or HANDOVER not in result.parameters:
            return False
        self._is_handed_over, self._source = True, str(result.parameters[HANDOVER])
        result.parameters = {name: value for name, value in result.parameters.items() if name != HANDOVER}
        return True

    async def end(self, results: AsyncGenerator[InferResult, None]) -> None:
        """Close the results of a call, or, of one that was handed over, read the rest in the background."""
        if self._is_handed_over and self._held is None:
            self._held, self._reading = results, asyncio.create_task(_drain(results))
        else:
            await results.aclose()

    async def close(self) -> None:
        """End the lease, if it has not ended."""
        if self._held is not None and self._reading is not None:
            await cancel_and_wait([self._reading])
            await self._held.aclose()  # it may not have begun to read


async def _drain(results: AsyncGenerator[InferResult, None]) -> None:
    async for _ in results:
        pass
