"""Streams of language models that go on at another replica when theirs is lost: ``MovableStream``."""

import math
from array import array
from dataclasses import replace

import numpy as np

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError, WeftError
from weft.base.signature import CONTINUED_LOGPROB, RESUME_INPUT, RESUME_LOGPROB, TOKENS_FLAG, TOKENS_OUTPUT
from weft.base.tensors import decode, encode

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
