"""Parsing of a language model's responses into deltas of choices."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.core import InferResult
from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.tensors import WireTensor, decode, split_bytes

TEXT_OUTPUT = "text_output"
OUTPUT_IDS = "output_ids"
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_CACHED_TOKENS = "num_cached_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
LOGPROBS = "logprobs"

#: Finish reasons of an unfinished choice.
_NO_REASON = ("", "None")
#: OpenAI's substitute for minus infinity, which JSON lacks.
_LEAST_LOGPROB = -9999.0
#: Replacement for bytes that form no character by themselves.
_NO_CHARACTER = "\ufffd"


class ScoredToken(NamedTuple):
    """A token with its log probability, and its bytes, possibly incomplete characters; None: not reported."""

    text: str
    logprob: float
    data: Sequence[int] | None = None

    @property
    def utf8(self) -> list[int] | None:
        """Bytes of the token; None: unknown."""
        if self.data is not None:
            return list(self.data)
        return None if _NO_CHARACTER in self.text else list(self.text.encode())


class PositionLogprobs(NamedTuple):
    """The sampled token of a position, and the most likely tokens there, best first."""

    sampled: ScoredToken
    top: Sequence[ScoredToken]


class ChoiceDelta(NamedTuple):
    """What one response adds to one choice; what is None is not reported by the model.

    Attributes:
        choice: Index of the choice.
        finish_reason: ``stop`` or ``length``, once, with the last delta of the choice.
        logprobs: Of its tokens.
        num_input_tokens, num_cached_tokens: Tokens of the prompt, and the prefix-cached ones of these.
        num_output_tokens: Tokens of this delta.
    """

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None

    @property
    def is_visible(self) -> bool:
        """Whether it has content for the client; tokens that may begin a stop string, for example, have no text yet."""
        return bool(self.text or self.finish_reason or self.logprobs)


class DeltaReader:
    """Parses the responses to one prompt; each has a text for every choice, possibly empty."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._ended: set[int] = set()

    def read(self, result: InferResult) -> Iterator[ChoiceDelta]:
        """The deltas of choices with an update.

        Raises InternalError if the tensors are inconsistent: the model violates its declared interface.
        """
        try:
            for delta in _deltas(result.outputs, self._num_choices):
                is_finished = delta.choice in self._ended
                if is_finished and not delta.text:
                    continue
                if delta.finish_reason is not None:
                    self._ended.add(delta.choice)
                yield delta
        except (InvalidArgumentError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise invalid_response(result.model_name) from error


def invalid_response(model: str) -> InternalError:
    """The error for a model that violates its declared interface."""
    return InternalError(f"the model '{model}' answered with tensors that do not fit")


def _deltas(outputs: Mapping[str, WireTensor], num_choices: int) -> Iterator[ChoiceDelta]:
    texts, reasons, logprobs = (_strings(outputs, name) for name in (TEXT_OUTPUT, FINISH_REASON, LOGPROBS))
    num_input, num_output = _numbers(outputs, NUM_INPUT_TOKENS), _numbers(outputs, NUM_OUTPUT_TOKENS)
    if texts is None:  # an optional output; what else there is counts
        texts = [""] * len(reasons or num_output or ())
    if len(texts) > num_choices:
        raise ValueError(f"{len(texts)} texts for {num_choices} choices")
    num_cached, ids = _numbers(outputs, NUM_CACHED_TOKENS), _numbers(outputs, OUTPUT_IDS)
    first_id = 0
    for choice, text in enumerate(texts):
        num_tokens = num_output[choice] if num_output else None
        own_ids = ids[first_id : first_id + num_tokens] if ids and num_tokens is not None else []
        first_id += num_tokens or 0
        yield ChoiceDelta(
            choice,
            text,
            None if not reasons or reasons[choice] in _NO_REASON else reasons[choice],
            _logprobs(logprobs[choice], own_ids) if logprobs else None,
            num_input[0] if num_input else None,
            num_tokens,
            num_cached[0] if num_cached else None,
        )


def _strings(outputs: Mapping[str, WireTensor], name: str) -> list[str] | None:
    if name not in outputs:
        return None
    return [text.decode(errors="replace") for text in split_bytes(outputs[name].data, name=name)]


def _numbers(outputs: Mapping[str, WireTensor], name: str) -> list[int] | None:
    return decode(outputs[name], name=name).ravel().tolist() if name in outputs else None


def _logprobs(text: str, ids: Sequence[int]) -> list[PositionLogprobs] | None:
    """Parse the JSON of a delta's tokens: per token a map from ids to ``logprob``, ``rank`` and ``decoded_token``.

    The sampled token is the one of ``ids``; if the model does not report ids, the one without a rank, else the first.
    """
    maps = json.loads(text) if text else None
    if maps is None:
        return None
    found = []
    for index, by_id in enumerate(maps):
        unranked = next((key for key, one in by_id.items() if one["rank"] is None), next(iter(by_id), ""))
        sampled = str(ids[index]) if index < len(ids) else unranked
        ranked = sorted((one for one in by_id.values() if one["rank"] is not None), key=lambda one: int(one["rank"]))
        found.append(PositionLogprobs(_token(by_id[sampled]), tuple(map(_token, ranked))))
    return found


def _token(value: Mapping[str, Any]) -> ScoredToken:
    logprob = float(value["logprob"])
    text, data = value["decoded_token"] or "", value.get("bytes")
    return ScoredToken(text, logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB, data)


def completion_logprobs(tokens: Sequence[PositionLogprobs] | None, text_offset: int) -> dict[str, Any] | None:
    """Format of ``/v1/completions``; None: not requested.

    ``top_logprobs`` is keyed by text, so among tokens with the same text only the most likely one is reported. The text
    of the first token begins at ``text_offset`` in the choice, in characters.
    """
    if tokens is None:
        return None
    offsets: list[int] = []
    for sampled, _ in tokens:
        offsets.append(text_offset)
        text_offset += len(sampled.text)
    return {
        "tokens": [sampled.text for sampled, _ in tokens],
        "token_logprobs": [sampled.logprob for sampled, _ in tokens],
        "top_logprobs": [_by_text(sampled, top) for sampled, top in tokens],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[PositionLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    """Format of ``/v1/chat/completions``, with at most ``num_top`` alternatives per token; None: not requested."""
    if tokens is None:
        return None
    content = [
        _chat_token(sampled) | {"top_logprobs": [_chat_token(one) for one in top[:num_top]]} for sampled, top in tokens
    ]
    return {"content": content, "refusal": None}


def _by_text(sampled: ScoredToken, top: Sequence[ScoredToken]) -> dict[str, float]:
    best: dict[str, float] = {}
    for token in (*top, sampled):
        best.setdefault(token.text, token.logprob)
    return best


def _chat_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.utf8}
