"""Output state of one choice: its new tokens, its text, its stop strings."""

import json
from collections.abc import Sequence

from weft.backends.llm.text import TextCodec
from weft.llm.request import Delta, TokenLogprobs
from weft.llm.sampling_params import SamplingParams
from weft.serving.detokenizer import Demand, StopStrings, enough_of

#: Finish reason of an unfinished choice in vLLM's Triton backend.
_NOT_FINISHED = "None"


class ChoiceOutput:
    """Accumulates the tokens of one choice between two responses. Detokenizes lazily.

    Args:
        params: Sampling parameters of the request.
        codec: The tokenizer, if there is one.
        prompt_ids: The last tokens of the prompt, the context of the first new token.
        wants_text: Whether ``take_text`` will be called.

    Attributes:
        finish_reason: ``"stop"`` or ``"length"``; "" while unfinished.
        cumulative_logprob: Sum over all its tokens, if the request asks for log probabilities.
        ids: New tokens since the last response.
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
        self._sent_ids: list[int] = []
        self._num_tokens = 0
        self._undecoded: list[int] = []
        self._ready = ""

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
        return json.dumps([self._token_logprobs(*pair) for pair in zip(self.ids, logprobs, strict=True)])

    def context_ids(self) -> Sequence[int]:
        """The tokens before ``ids`` that are needed to detokenize them, at least 64 if there are that many.

        They start within the output, or else include the end of the prompt. Without a tokenizer the required number is
        unknown, so all are returned.
        """
        if self._codec is not None:
            demand = Demand(self._params.skip_special_tokens, self._stop.max_kept_chars, bool(self.finish_reason))
            enough = enough_of(self._codec.detokenizer, self._sent_ids, self.ids, demand)
            if enough is not None:
                return enough
        return [*self._prompt_ids, *self._sent_ids]

    def mark_sent(self) -> None:
        """Start a new response: the tokens so far were sent."""
        self._sent_ids += self.ids
        self.ids = []
        self._logprobs.clear()
        self.has_update = False

    @property
    def num_previous(self) -> int:
        """Number of its tokens in earlier responses."""
        return len(self._sent_ids)

    @property
    def reported_finish_reason(self) -> str:
        """``finish_reason`` as reported to clients."""
        return self.finish_reason or _NOT_FINISHED

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
        """Whether a stop string ended the text, and thus the choice."""
        if self._stop.stopped_by is None:
            return False
        self.finish_reason = "stop"
        if self._params.include_stop_str_in_output:
            self._ready += self._stop.stopped_by
        return True

    def _token_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, dict[str, object]]:
        ranks = {top_id: rank for rank, top_id in enumerate(logprobs.top_ids, 1)}
        by_id = {token_id: logprobs.logprob, **dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))}
        return {each: self._logprob_entry(each, logprob, ranks.get(each)) for each, logprob in by_id.items()}

    def _logprob_entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, object]:
        text, data = (None, None) if self._codec is None else self._codec.shown_token(token_id)
        return {"logprob": logprob, "rank": rank, "decoded_token": text, "bytes": data}
