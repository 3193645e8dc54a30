"""One continuation of a prompt on its way to the client: its new tokens, its text, where it stops."""

import json
from collections.abc import Sequence

from weft_model.backends.llm.text import TextCodec
from weft_model.llm.request import Delta, TokenLogprobs
from weft_model.llm.sampling_params import SamplingParams
from weft_serving.detokenizer import Demand, StopStrings, enough_of

#: What vLLM's Triton backend says of a choice that goes on.
_GOES_ON = "None"


class ChoiceOutput:
    """Gathers what comes between two responses. Text is made of tokens no earlier than it is needed.

    Args:
        params: Of the request.
        codec: The tokenizer, if there is one.
        prompt_ids: The last tokens of the prompt, which the text continues.
        wants_text: Whether ``take_text`` will be called.

    Attributes:
        finish_reason: ``"stop"`` or ``"length"``; "" while it goes on.
        cumulative_logprob: Of all its tokens, as far as the request asks for log probabilities.
        ids: New tokens since the last response.
        has_news: Whether a response would say something new.
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
        self.has_news = False
        self._logprobs: list[TokenLogprobs] = []
        self._told: list[int] = []
        self._num_tokens = 0
        self._undecoded: list[int] = []
        self._ready = ""

    def add(self, delta: Delta) -> None:
        """The choice has the new tokens, up to a stop string, which ends it."""
        if self.finish_reason:
            return  # the engine was ahead of a stop string
        logprobs = delta.logprobs or []
        if not self._params.stop:
            self._take(delta.token_ids, logprobs)
        else:
            for index, token_id in enumerate(delta.token_ids):  # one by one, so that none behind the end is taken
                self._take([token_id], logprobs[index : index + 1])
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
        """The log probabilities since the last response, as JSON: for each token a map by token id; null if not asked.

        The sampled token comes first, then the likeliest. Each has ``logprob``, ``decoded_token``, ``bytes``, and
        ``rank``: 1 for the likeliest, null for a sampled token that is not among those reported.
        """
        logprobs, self._logprobs = self._logprobs, []
        if self._params.logprobs is None:
            return "null"
        return json.dumps([self._described(*pair) for pair in zip(self.ids, logprobs, strict=True)])

    def context_ids(self) -> Sequence[int]:
        """The tokens before ``ids`` that their text depends on, at least 64, where there are more.

        They begin within the answer, or else have the end of the prompt before them. Without a tokenizer nobody knows
        how many are enough, so then they are all.
        """
        if self._codec is not None:
            demand = Demand(self._params.skip_special_tokens, self._stop.max_kept_chars, bool(self.finish_reason))
            enough = enough_of(self._codec.detokenizer, self._told, self.ids, demand)
            if enough is not None:
                return enough
        return [*self._prompt_ids, *self._told]

    def told(self) -> None:
        """A response was made of what there was."""
        self._told += self.ids
        self.ids = []
        self._logprobs.clear()
        self.has_news = False

    @property
    def num_previous(self) -> int:
        """Number of its tokens in earlier responses."""
        return len(self._told)

    @property
    def shown_reason(self) -> str:
        """``finish_reason`` as clients see it."""
        return self.finish_reason or _GOES_ON

    def _take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self.has_news = True
        self.ids += token_ids
        self._undecoded += token_ids
        self._num_tokens += len(token_ids)
        self._logprobs += logprobs
        self.cumulative_logprob += sum(each.logprob for each in logprobs)

    def _decode(self) -> None:
        if self._text is not None and self._undecoded:
            text = self._text.push(self._undecoded)
            # What looks like a stop string before ``min_tokens`` is none.
            self._ready += text if self._num_tokens <= self._params.min_tokens else self._stop.push(text)
        self._undecoded = []

    def _end(self, *, ends_by_token: bool) -> None:
        """All text is there; a token that ended the sequence gives none, unless the request wants it."""
        self.has_news = True
        if ends_by_token and self._undecoded and not self._params.include_stop_str_in_output:
            self._undecoded.pop()
        self._decode()
        if self._text is not None:
            self._ready += self._stop.push(self._text.finish()) + self._stop.finish()

    def _has_stopped(self) -> bool:
        """Whether a stop string has ended the text, and so the choice."""
        if self._stop.stopped_by is None:
            return False
        self.finish_reason = "stop"
        if self._params.include_stop_str_in_output:
            self._ready += self._stop.stopped_by
        return True

    def _described(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, dict[str, object]]:
        ranks = {top_id: rank for rank, top_id in enumerate(logprobs.top_ids, 1)}
        by_id = {token_id: logprobs.logprob, **dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))}
        return {each: self._shown(each, logprob, ranks.get(each)) for each, logprob in by_id.items()}

    def _shown(self, token_id: int, logprob: float, rank: int | None) -> dict[str, object]:
        text, data = (None, None) if self._codec is None else self._codec.shown_token(token_id)
        return {"logprob": logprob, "rank": rank, "decoded_token": text, "bytes": data}
