"""One request from its first token to its last response; belongs to the output thread."""

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

#: Responses of one request that its reader has not taken; beyond it tokens are gathered for the next one.
MAX_UNTAKEN = 4
#: Tokens of the prompt that its continuation is decoded after.
_NUM_CONTEXT_IDS = 64


class ResponseSink(Protocol):
    """Takes the responses; a ``ResponseStream`` is one."""

    def deliver(self, response: InferenceResponse | WeftError | None, *, is_final: bool) -> None:
        """The response is on its way; never waits."""


class Generation:
    """Turns what the engine gives for one request into responses.

    A streamed request gets a response when there is news and fewer than ``MAX_UNTAKEN`` are on their way, so that a
    slow reader gets fewer and longer ones and costs nobody else anything. Its last response never waits.

    Args:
        request: The request.
        asked: What it asks for.
        codec: The tokenizer, if there is one.
        sink: Takes the responses.
        finish: Ends the work of the engine on a choice that has what it wanted, by its index.
        withdraw: Ends it of one that nobody wants.
        on_over: Called when its last response is on its way.
    """

    def __init__(
        self,
        request: InferenceRequest,
        asked: GenerationRequest,
        codec: TextCodec | None,
        sink: ResponseSink,
        *,
        finish: Callable[[int], None],
        withdraw: Callable[[], None],
        on_over: Callable[[], None],
    ) -> None:
        self._request = request
        self._asked = asked
        self._sink = sink
        self._finish = finish
        self._withdraw = withdraw
        self._on_over = on_over
        self._codec = codec
        self._choices: list[ChoiceOutput] = []  # none before the first token
        self._echo = asked.echo
        self._num_untaken = 0
        self._num_cached_tokens = self._num_tokens = self._first_token_ns = 0
        self._is_over = False

    def add(self, delta: Delta) -> None:
        """The engine has gone on, or has given the request up."""
        if self._is_over:
            return
        if delta.error is not None:
            self._end(delta.error)
            return
        if not self._choices:
            self._begin()
            self._num_cached_tokens = delta.num_cached_tokens
        self._num_tokens += len(delta.token_ids)
        choice = self._choices[delta.choice]
        has_ended = bool(choice.finish_reason)
        choice.add(delta)
        if choice.finish_reason and not (has_ended or delta.finish_reason):
            self._finish(delta.choice)  # by a stop string, which the engine does not know

    def taken(self) -> None:
        """The reader has taken a response."""
        self._num_untaken -= 1

    def fail(self, error: WeftError) -> None:
        """The request ends with an error; the engine stops working on it."""
        if not self._is_over:
            self._withdraw()
            self._end(error)

    def flush(self) -> None:
        """What there is to say is on its way, if it may be."""
        if self._is_over or not self._choices:
            return
        if all(choice.finish_reason for choice in self._choices):
            self._end(None)
        elif self._may_send():
            self._num_untaken += 1
            self._sink.deliver(self._response(), is_final=False)

    def _begin(self) -> None:
        """The first token is there; the engine has found the prompt to be sound."""
        self._first_token_ns = time.monotonic_ns()
        asked = self._asked
        context = asked.prompt_ids[-_NUM_CONTEXT_IDS:].tolist()
        wants_text = tensors.TEXT_OUTPUT in asked.outputs
        self._choices = [
            ChoiceOutput(asked.params, self._codec, context, wants_text=wants_text) for _ in range(asked.params.n)
        ]

    def _may_send(self) -> bool:
        if not self._asked.is_streamed or self._num_untaken >= MAX_UNTAKEN:
            return False
        return any(choice.has_news for choice in self._choices)

    def _end(self, error: WeftError | None) -> None:
        response = error or self._response()
        self._is_over = True
        self._sink.deliver(response, is_final=True)
        self._on_over()
        self._trace(error)

    def _trace(self, error: WeftError | None) -> None:
        from weft_common.observing import telemetry  # noqa: PLC0415  # it brings gRPC, which a check of a repository does without
        from weft_serving.served import spans  # noqa: PLC0415  # same

        if telemetry.is_enabled():
            numbers = {
                "weft.num_input_tokens": len(self._asked.prompt_ids),
                "weft.num_cached_tokens": self._num_cached_tokens,
                "weft.num_output_tokens": self._num_tokens,
            }
            spans.record_generation(self._request, numbers, self._first_token_ns, error)

    def _response(self) -> InferenceResponse:
        outputs = {name: self._output(name) for name in self._asked.outputs}
        for choice in self._choices:
            choice.told()
        return InferenceResponse(outputs)

    def _output(self, name: str) -> Array:
        choices = self._choices
        match name:
            case tensors.TEXT_OUTPUT:
                echo, self._echo = self._echo, ""
                return _texts([echo + choice.take_text() for choice in choices])
            case tensors.FINISH_REASON:
                return _texts([choice.shown_reason for choice in choices])
            case tensors.LOGPROBS:
                return _texts([choice.take_logprobs() for choice in choices])
            case tensors.CUMULATIVE_LOGPROB:
                return np.array([choice.cumulative_logprob for choice in choices], np.float32)
            case tensors.NUM_INPUT_TOKENS:
                return np.array([len(self._asked.prompt_ids)], np.uint32)
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
