"""Builds the responses of one request from the engine's deltas; runs on the output thread."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np

from weft.backends.llm import tensors
from weft.backends.llm.tensors import GenerationRequest
from weft.backends.llm.text import TextCodec
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import Array
from weft.llm.request import HELD, RELEASED, Delta, SamplingParams, StepLogprobs, TokenLogprobs
from weft.serving.detokenizer import Demand, StopStrings, enough_of
from weft.serving.request.request import InferenceRequest, InferenceResponse, Work
from weft.v2.protocol.handover import HANDOVER

#: Finish reason of an unfinished choice in vLLM's Triton backend.
_NOT_FINISHED = "None"


class ChoiceOutput:
    """Accumulates the tokens of one choice between two responses. Detokenizes lazily.

    Args:
        prompt_ids: The last tokens of the prompt, the context of the first new token.
        wants_text: Whether ``take_text`` will be called.

    Attributes:
        finish_reason: ``"stop"`` or ``"length"``; "" while unfinished.
        cumulative_logprob: Sum over all its tokens, if the request asks for log probabilities.
        ids: Tokens since the last response; ``sent_ids``: those before.
        has_update: Whether a response would contain anything new.
    """

    def __init__(
        self, params: SamplingParams, codec: TextCodec | None, prompt_ids: Sequence[int], *, wants_text: bool
    ) -> None:
        self._params = params
        self._codec = codec
        self._prompt_ids = prompt_ids
        self._stop = StopStrings(params.stop)
        self._text = None
        if codec is not None and (wants_text or params.stop):
            self._text = codec.detokenizer.stream(skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids)
        self.finish_reason = ""
        self.cumulative_logprob = 0.0
        self.ids: list[int] = []
        self.has_update = False
        self._logprobs: list[TokenLogprobs] = []
        self.sent_ids: list[int] = []
        self._num_tokens = 0
        self._undecoded: list[int] = []
        self._ready = ""

    def resume(self, token_ids: Sequence[int], cumulative_logprob: float) -> None:
        """Take tokens that were sent before, by another engine; a stop string among them is in ``stopped_by``."""
        for token_id in token_ids:
            self._append([token_id], ())
            self._decode()
        self.take_text()
        self.mark_sent()
        self.cumulative_logprob = cumulative_logprob

    def add(self, delta: Delta) -> None:
        """Append new tokens, up to a stop string, which finishes the choice."""
        if self.finish_reason:
            return  # tokens that the engine sampled behind a stop string
        logprobs = delta.logprobs or []
        if not self._params.stop:
            self._append(delta.token_ids, logprobs)
        else:
            for index, token_id in enumerate(delta.token_ids):  # one by one, to discard tokens behind a stop string
                self._append([token_id], logprobs[index : index + 1])
                is_end_token = delta.finish_reason == "stop" and index == len(delta.token_ids) - 1
                if not is_end_token:
                    self._decode()
                if self._has_stopped():
                    return
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason
            self._end(ends_by_token=delta.finish_reason == "stop")
            self._has_stopped()

    def take_text(self) -> str:
        """The text since the last response."""
        if not self._params.stop and not self.finish_reason:
            self._decode()
        text, self._ready = self._ready, ""
        return text

    def take_logprobs(self) -> str:
        """The log probabilities since the last response, as JSON: per token a map by token id; null if not requested.

        The sampled token comes first, then the most likely ones. Each has ``logprob``, ``decoded_token``, ``bytes``,
        and ``rank``: 1 for the most likely, null for a sampled token that is not among those reported.
        """
        logprobs, self._logprobs = self._logprobs, []
        if self._params.logprobs is None:
            return "null"
        return json.dumps([_shown(self._codec, *pair) for pair in zip(self.ids, logprobs, strict=True)])

    def context_ids(self) -> Sequence[int]:
        """The tokens before ``ids`` that are needed to detokenize them, at least 64 if there are that many.

        They start within the output, or else include the end of the prompt. Without a tokenizer the required number is
        unknown, so all are returned.
        """
        if self._codec is not None:
            demand = Demand(self._params.skip_special_tokens, self._stop.max_kept_chars, bool(self.finish_reason))
            enough = enough_of(self._codec.detokenizer, self.sent_ids, self.ids, demand)
            if enough is not None:
                return enough
        return [*self._prompt_ids, *self.sent_ids]

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the choice; "": none did."""
        return self._stop.stopped_by or ""

    def mark_sent(self) -> None:
        """Start a new response: the tokens so far were sent."""
        self.sent_ids += self.ids
        self.ids = []
        self._logprobs.clear()
        self.has_update = False

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.has_update = True
        self.ids += token_ids
        self._undecoded += token_ids
        self._num_tokens += len(token_ids)
        self._logprobs += logprobs
        self.cumulative_logprob += sum(each.logprob for each in logprobs)

    def _decode(self) -> None:
        if self._text is not None and self._undecoded:
            text = self._text.push(self._undecoded)
            # Stop strings have no effect before ``min_tokens``.
            self._ready += text if self._num_tokens <= self._params.min_tokens else self._stop.push(text)
        self._undecoded = []

    def _end(self, *, ends_by_token: bool) -> None:
        """Decode the rest; the text excludes a stop token, unless the request includes it."""
        self.has_update = True
        if ends_by_token and self._undecoded and not self._params.include_stop_str_in_output:
            self._undecoded.pop()
        self._decode()
        if self._text is not None:
            self._ready += self._stop.push(self._text.finish()) + self._stop.finish()

    def _has_stopped(self) -> bool:
        if self._stop.stopped_by is None:
            return False
        self.finish_reason = "stop"
        if self._params.include_stop_str_in_output:
            self._ready += self._stop.stopped_by
        return True


def _shown(codec: TextCodec | None, token_id: int, logprobs: TokenLogprobs | None) -> dict[int, dict[str, object]]:
    """A token and those that were likeliest there, as ``take_logprobs`` has them; None: nothing stands before it."""
    logprob, top_ids, top = logprobs or (None, (), ())
    ranks = {top_id: rank for rank, top_id in enumerate(top_ids, 1)}
    by_id = {token_id: logprob, **dict(zip(top_ids, top, strict=True))}
    entries: dict[int, dict[str, object]] = {}
    for each, value in by_id.items():
        text, data = (None, None) if codec is None else codec.shown_token(each)
        entries[each] = {"logprob": value, "rank": ranks.get(each), "decoded_token": text, "bytes": data}
    return entries


#: Most responses of one request that its client has not read; further tokens accumulate for the next response.
MAX_RESPONSES_IN_FLIGHT = 4
#: Prompt tokens that serve as context for detokenization.
_NUM_CONTEXT_IDS = 64
#: Of OpenTelemetry's conventions for generative AI.
_OPERATION = "text_completion"
#: Most responses that are events of the generation's span.
_MAX_EVENTS = 100


class ResponseSink(Protocol):
    """Receiver of responses, such as a ``ResponseStream``."""

    def deliver(self, response: InferenceResponse | WeftError | None, *, is_final: bool) -> None:
        """Send a response without blocking."""


class Generation:
    """Converts the engine's deltas for one request into responses.

    A streamed request gets a response when there is an update and fewer than ``MAX_RESPONSES_IN_FLIGHT`` are unread, so
    a slow client gets fewer and longer ones and delays no other request. The final response is sent at once.

    Args:
        finish: Finishes a choice in the engine, by its index.
        on_done: Called after the final response was sent.
        source: Where blocks of the prompt are, if the request is handed over after its first token; else "".

    Attributes:
        events: Of its span: name, time, attributes.
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
        source: str = "",
    ) -> None:
        self.events: list[tuple[str, int, Mapping[str, Any]]] = []
        self._source = source
        self._is_held = False
        self._request = request
        self._generation_request = generation_request
        self._sink = sink
        self._finish = finish
        self._cancel = cancel
        self._on_done = on_done
        self._codec = codec
        self._choices: list[ChoiceOutput] = []  # none before the first token
        self._echo = generation_request.echo
        self._prompt_logprobs: list[StepLogprobs] | None = None
        self._num_in_flight = 0
        self._num_cached_tokens = self._num_tokens = self._first_token_ns = 0
        #: Time and tokens so far of the latest responses.
        self._responses: deque[tuple[int, int]] = deque(maxlen=_MAX_EVENTS)
        self._is_done = False
        request.describe = self.describe

    def add(self, delta: Delta) -> None:
        """Process new tokens or an error from the engine."""
        if self._is_done:
            return
        if delta.error is not None:
            self._end(delta.error)
            return
        if delta.finish_reason == RELEASED:  # another replica goes on, or nobody asked for the blocks in time
            self.flush()  # it may have come together with the first token
            if self._is_done:
                return
            self._is_done = True
            self._sink.deliver(None, is_final=True)
            self._on_done()
            return
        if not self._choices:
            self._start()
            if self._is_done:
                return
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._num_tokens += len(delta.token_ids)
        choice = self._choices[delta.choice]
        if delta.finish_reason == HELD:
            self._is_held, delta.finish_reason = True, ""
        has_ended = bool(choice.finish_reason)
        choice.add(delta)
        if choice.finish_reason and not (has_ended or delta.finish_reason):
            self._cancel() if self._is_held else self._finish(delta.choice)  # at a stop string: the engine goes on

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
        elif self._is_held:
            self._is_held = False
            response = self._response()
            response.parameters = {HANDOVER: self._source}
            self._sink.deliver(response, is_final=False)
        elif (
            self._generation_request.is_streamed
            and self._num_in_flight < MAX_RESPONSES_IN_FLIGHT
            and any(choice.has_update for choice in self._choices)
        ):
            self._num_in_flight += 1
            self._responses.append((time.monotonic_ns(), self._num_tokens))
            self._sink.deliver(self._response(), is_final=False)

    def _start(self) -> None:
        self._first_token_ns = time.monotonic_ns()
        generation_request = self._generation_request
        context = generation_request.prompt_ids[-_NUM_CONTEXT_IDS:].tolist()
        wants_text = tensors.TEXT_OUTPUT in generation_request.outputs
        self._choices = [
            ChoiceOutput(generation_request.params, self._codec, context, wants_text=wants_text)
            for _ in range(generation_request.params.n)
        ]
        self._choices[0].resume(generation_request.resume_token_ids, generation_request.resume_logprob)
        if stop := self._choices[0].stopped_by:
            self.fail(
                InvalidArgumentError(
                    f"resume_token_ids has the stop string {stop!r}: the output is complete; do not resume it"
                )
            )

    def _end(self, error: WeftError | None) -> None:
        if num_dropped := self._generation_request.num_dropped:
            if not self._generation_request.params.use_beam_search:  # else they are ranked
                self._choices = sorted(self._choices, key=lambda choice: -choice.cumulative_logprob)
            self._choices = self._choices[:-num_dropped]
        response = error or self._response()
        self._is_done = True
        self._sink.deliver(response, is_final=True)
        self._on_done()

    def describe(self) -> Work:
        """Describe the generation so far, for its span; thread-safe."""
        params = self._generation_request.params
        choices = self._choices
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": "weft",
            "gen_ai.request.model": self._request.call.model_name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": len(self._generation_request.prompt_ids),
            "gen_ai.usage.output_tokens": self._num_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
            "gen_ai.response.model": self._request.call.model_name,
            "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices if choice.finish_reason],
            "weft.priority": self._request.priority,
        }
        for name, value, default in (
            ("choice.count", params.n, 1),
            ("top_k", params.top_k, 0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("presence_penalty", params.presence_penalty, 0.0),
            ("seed", params.seed, None),
            ("stop_sequences", list(params.stop), []),
        ):
            if value != default:
                attributes[f"gen_ai.request.{name}"] = value
        if self._request.call.request_id:
            attributes["gen_ai.response.id"] = self._request.call.request_id
        events = self.events[:]
        if self._first_token_ns:
            events.append(("first_token", self._first_token_ns, {}))
        events += [("response", at_ns, {"gen_ai.usage.output_tokens": num}) for at_ns, num in tuple(self._responses)]
        return Work(f"{_OPERATION} {self._request.call.model_name}", attributes, events)

    def _response(self) -> InferenceResponse:
        outputs = {name: self._output(name) for name in self._generation_request.outputs}
        for choice in self._choices:
            choice.mark_sent()
        return InferenceResponse(outputs)

    def _take_prompt_logprobs(self) -> str:
        """The log probabilities of the prompt's tokens, as ``take_logprobs`` has them, once; the first has none."""
        pieces, self._prompt_logprobs = self._prompt_logprobs, None
        if pieces is None:
            return "null"
        num_top = self._generation_request.params.prompt_logprobs or 0
        rows = (piece.row(row, num_top) for piece in pieces for row in range(len(piece.sampled)))
        ids = self._generation_request.prompt_ids.tolist()
        return json.dumps([_shown(self._codec, *pair) for pair in zip(ids, chain((None,), rows), strict=True)])

    def _output(self, name: str) -> Array:
        choices = self._choices
        match name:
            case tensors.TEXT_OUTPUT:
                echo, self._echo = self._echo, ""
                return _texts([echo + choice.take_text() for choice in choices])
            case tensors.FINISH_REASON:
                return _texts([choice.finish_reason or _NOT_FINISHED for choice in choices])
            case tensors.STOP_REASON:
                return _texts([choice.stopped_by for choice in choices])
            case tensors.LOGPROBS:
                return _texts([choice.take_logprobs() for choice in choices])
            case tensors.PROMPT_LOGPROBS:
                return _texts([self._take_prompt_logprobs()])
            case tensors.CUMULATIVE_LOGPROB:
                return np.array([choice.cumulative_logprob for choice in choices], np.float32)
            case tensors.NUM_INPUT_TOKENS:
                return np.array([len(self._generation_request.prompt_ids)], np.uint32)
            case tensors.NUM_CACHED_TOKENS:
                return np.array([self._num_cached_tokens], np.uint32)
            case tensors.NUM_OUTPUT_TOKENS:
                return np.array([len(choice.ids) for choice in choices], np.uint32)
            case tensors.NUM_PREVIOUS_TOKENS:
                return np.array([len(choice.sent_ids) for choice in choices], np.uint32)
            case tensors.CONTEXT_IDS:
                return np.array([token_id for choice in choices for token_id in choice.context_ids()], np.int32)
            case _:
                return np.array([token_id for choice in choices for token_id in choice.ids], np.int32)


def _texts(texts: list[str]) -> "np.ndarray[Any, np.dtype[np.object_]]":
    array = np.empty(len(texts), np.object_)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return array
