"""Response assembly for one request; runs on the output thread."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from weft_common.errors import WeftError
from weft_common.tensors import Array
from weft_model.backends.llm import tensors
from weft_model.backends.llm.choice import ChoiceOutput
from weft_model.backends.llm.generation_request import GenerationRequest
from weft_model.backends.llm.text import TextCodec
from weft_model.llm.request import Delta
from weft_serving.request.request import InferenceRequest, InferenceResponse

#: Most responses of one request that its client has not read; further tokens accumulate for the next response.
MAX_RESPONSES_IN_FLIGHT = 4
#: Prompt tokens that serve as context for detokenization.
_NUM_CONTEXT_IDS = 64


class ResponseSink(Protocol):
    """Receiver of responses, such as a ``ResponseStream``."""

    def deliver(self, response: InferenceResponse | WeftError | None, *, is_final: bool) -> None:
        """Send a response without blocking."""


class Generation:
    """Converts the engine's deltas for one request into responses.

    A streamed request gets a response when there is an update and fewer than ``MAX_RESPONSES_IN_FLIGHT`` are unread, so
    a slow client gets fewer and longer ones and delays no other request. The final response is sent at once.

    Args:
        request: The request.
        generation_request: Its parsed content.
        codec: The tokenizer, if there is one.
        sink: Receives the responses.
        finish: Finishes a choice in the engine, by its index.
        cancel: Cancels the request in the engine.
        on_done: Called after the final response was sent.
    """

    def __init__(
        self,
        request: InferenceRequest,
        generation_request: GenerationRequest,
        codec: TextCodec | None,
        sink: ResponseSink,
        *,
        finish: Callable[[int], None],
        cancel: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self._request = request
        self._generation_request = generation_request
        self._sink = sink
        self._finish = finish
        self._cancel = cancel
        self._on_done = on_done
        self._codec = codec
        self._choices: list[ChoiceOutput] = []  # none before the first token
        self._echo = generation_request.echo
        self._num_in_flight = 0
        self._num_cached_tokens = self._num_tokens = self._first_token_ns = 0
        self._is_done = False

    def add(self, delta: Delta) -> None:
        """Process new tokens or an error from the engine."""
        if self._is_done:
            return
        if delta.error is not None:
            self._end(delta.error)
            return
        if not self._choices:
            self._start()
            self._num_cached_tokens = delta.num_cached_tokens
        self._num_tokens += len(delta.token_ids)
        choice = self._choices[delta.choice]
        has_ended = bool(choice.finish_reason)
        choice.add(delta)
        if choice.finish_reason and not (has_ended or delta.finish_reason):
            self._finish(delta.choice)  # at a stop string, which the engine does not know

    def on_response_taken(self) -> None:
        """Count a response that the client has read."""
        self._num_in_flight -= 1

    def fail(self, error: WeftError) -> None:
        """End the request with an error, and cancel it in the engine."""
        if not self._is_done:
            self._cancel()
            self._end(error)

    def flush(self) -> None:
        """Send a response if there is an update and the limit of unread responses allows it."""
        if self._is_done or not self._choices:
            return
        if all(choice.finish_reason for choice in self._choices):
            self._end(None)
        elif self._may_send():
            self._num_in_flight += 1
            self._sink.deliver(self._response(), is_final=False)

    def _start(self) -> None:
        """Set up the choices at the first token; the engine has validated the prompt by then."""
        self._first_token_ns = time.monotonic_ns()
        generation_request = self._generation_request
        context = generation_request.prompt_ids[-_NUM_CONTEXT_IDS:].tolist()
        wants_text = tensors.TEXT_OUTPUT in generation_request.outputs
        self._choices = [
            ChoiceOutput(generation_request.params, self._codec, context, wants_text=wants_text)
            for _ in range(generation_request.params.n)
        ]

    def _may_send(self) -> bool:
        if not self._generation_request.is_streamed or self._num_in_flight >= MAX_RESPONSES_IN_FLIGHT:
            return False
        return any(choice.has_update for choice in self._choices)

    def _end(self, error: WeftError | None) -> None:
        response = error or self._response()
        self._is_done = True
        self._sink.deliver(response, is_final=True)
        self._on_done()
        self._trace(error)

    def _trace(self, error: WeftError | None) -> None:
        from weft_common.observing import telemetry  # noqa: PLC0415  # imports gRPC, which checking a repository does not need
        from weft_serving.served import spans  # noqa: PLC0415  # same

        if telemetry.is_enabled():
            numbers = {
                "weft.num_input_tokens": len(self._generation_request.prompt_ids),
                "weft.num_cached_tokens": self._num_cached_tokens,
                "weft.num_output_tokens": self._num_tokens,
            }
            spans.record_generation(self._request, numbers, self._first_token_ns, error)

    def _response(self) -> InferenceResponse:
        outputs = {name: self._output(name) for name in self._generation_request.outputs}
        for choice in self._choices:
            choice.mark_sent()
        return InferenceResponse(outputs)

    def _output(self, name: str) -> Array:
        choices = self._choices
        match name:
            case tensors.TEXT_OUTPUT:
                echo, self._echo = self._echo, ""
                return _texts([echo + choice.take_text() for choice in choices])
            case tensors.FINISH_REASON:
                return _texts([choice.reported_finish_reason for choice in choices])
            case tensors.LOGPROBS:
                return _texts([choice.take_logprobs() for choice in choices])
            case tensors.CUMULATIVE_LOGPROB:
                return np.array([choice.cumulative_logprob for choice in choices], np.float32)
            case tensors.NUM_INPUT_TOKENS:
                return np.array([len(self._generation_request.prompt_ids)], np.uint32)
            case tensors.NUM_CACHED_TOKENS:
                return np.array([self._num_cached_tokens], np.uint32)
            case tensors.NUM_OUTPUT_TOKENS:
                return np.array([len(choice.ids) for choice in choices], np.uint32)
            case tensors.NUM_PREVIOUS_TOKENS:
                return np.array([choice.num_previous for choice in choices], np.uint32)
            case tensors.CONTEXT_IDS:
                return np.array([token_id for choice in choices for token_id in choice.context_ids()], np.int32)
            case _:
                return np.array([token_id for choice in choices for token_id in choice.ids], np.int32)


def _texts(texts: list[str]) -> "np.ndarray[Any, np.dtype[np.object_]]":
    array = np.empty(len(texts), np.object_)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return array
