"""Calls that two replicas answer: ``MovableStream``, after the loss of one, and ``SplitCall``, prefill and decode."""

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np

from weft.base.cancellation import cancel_and_wait
from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError, WeftError
from weft.base.signature import (
    CONTINUED_LOGPROB,
    RESUME_INPUT,
    RESUME_LOGPROB,
    TOKENS_FLAG,
    TOKENS_OUTPUT,
    parameter_text,
)
from weft.base.tensors import decode, encode
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
        if model.config is not None and (text := parameter_text(model.config, parameter)):
            return text
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


_PROMPT = "input_ids"


class MovableStream:
    """The tokens of one stream so far, behind which another replica goes on.

    They are asked for beside what the client wants, and taken out of the responses again.

    Args:
        call: The client's.
        limit: Most moves; 0: the stream cannot move.

    Attributes:
        call: To send to the next replica.
        num_moves: Times that it went on at another replica.
        has_begun: A response has come.
        is_under_way: A response has come since the last move.
        made_progress: One had come from the replica before, so the request is not what ended that.
    """

    def __init__(self, call: InferCall, limit: int) -> None:
        self.call = call
        self.num_moves = 0
        self.has_begun = self.is_under_way = self.made_progress = False
        self._is_over = self._is_hidden = False
        self._tokens = array("i")
        self._logprob = math.nan
        self._loss: WeftError | None = None
        asked = [output for output in call.outputs if output.name == TOKENS_OUTPUT]
        self.limit = 0 if any(output.parameters for output in asked) else limit  # they may go elsewhere
        if self.limit and not asked and call.outputs:
            self._is_hidden = True
            self.call = replace(call, outputs=(*call.outputs, RequestedOutput(TOKENS_OUTPUT, {})))
        elif self.limit and not asked and _PROMPT not in call.inputs and TOKENS_FLAG not in call.inputs:
            self._is_hidden = True
            self.call = replace(call, inputs={**call.inputs, TOKENS_FLAG: encode(np.ones(1, np.bool_))})

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self._tokens)

    def take(self, result: InferResult) -> InferResult:
        """Note a response of the replica; returns it as the client gets it."""
        self.has_begun = self.is_under_way = True
        self._is_over = result.is_final
        tokens = result.outputs.get(TOKENS_OUTPUT)
        if not self.limit or tokens is None:
            return result
        self._tokens.frombytes(tokens.data)
        if (logprob := result.outputs.get(CONTINUED_LOGPROB)) is not None:
            self._logprob = float(decode(logprob)[0])
        if self._is_hidden:
            del result.outputs[TOKENS_OUTPUT]
        return result

    def move(self, error: WeftError) -> None:
        """Prepare ``call`` to go on after ``error``; no effect if the last replica refused it, so that it is repeated.

        Raises:
            WeftError: ``error``, or that of the last loss: the stream cannot go on elsewhere, or has moved too often.
        """
        if not self.is_under_way and error.code == InvalidArgumentError.code and self._loss is not None:
            raise self._loss from error  # it has several choices, or the other replica is smaller
        if not self.is_under_way and error.is_refused:
            return
        is_full = not self.is_under_way and error.code == ResourceExhaustedError.code
        if not (is_full or error.code == UnavailableError.code) or self._is_over or self.num_moves >= self.limit:
            raise error
        self.num_moves += 1
        self._loss = error
        self.go_on()

    def go_on(self) -> None:
        """Prepare ``call`` to go on behind the tokens so far."""
        self.made_progress, self.is_under_way = self.is_under_way, False
        inputs = {**self.call.inputs, RESUME_INPUT: encode(np.array(self._tokens, np.int32))}
        more = {} if math.isnan(self._logprob) else {RESUME_LOGPROB: self._logprob}
        self.call = replace(self.call, inputs=inputs, parameters={**self.call.parameters, **more})
