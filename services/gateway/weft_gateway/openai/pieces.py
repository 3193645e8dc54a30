"""What a language model answers, response by response: pieces of each choice."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft_common.core import InferResult
from weft_common.errors import InternalError, InvalidArgumentError
from weft_common.tensors import WireTensor, decode, split_bytes

TEXT_OUTPUT = "text_output"
OUTPUT_IDS = "output_ids"
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_CACHED_TOKENS = "num_cached_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
LOGPROBS = "logprobs"

#: Of a choice that goes on.
_NO_REASON = ("", "None")
#: In place of minus infinity, which JSON has not; as OpenAI says it.
_LEAST_LOGPROB = -9999.0
#: In place of what is no text by itself, as a part of a character.
_NO_CHARACTER = "\ufffd"


class StreamedToken(NamedTuple):
    """A token.

    Attributes:
        text: Its own.
        logprob: Logarithm of its probability.
        data: Its bytes, which need not be whole characters; None: the model does not tell.
    """

    text: str
    logprob: float
    data: Sequence[int] | None = None

    @property
    def utf8(self) -> list[int] | None:
        """Bytes of the token; None: they are not known."""
        if self.data is not None:
            return list(self.data)
        return None if _NO_CHARACTER in self.text else list(self.text.encode())


class AnswerLogprobs(NamedTuple):
    """A token of an answer, and the most probable tokens in its place, best first."""

    sampled: StreamedToken
    top: Sequence[StreamedToken]


class Piece(NamedTuple):
    """What one response adds to one choice.

    Attributes:
        choice: Index of the choice.
        text: What follows the text so far.
        finish_reason: ``stop`` or ``length``, once, with the last piece of the choice; None before, or where the model
            does not tell.
        logprobs: Of its tokens; None: the model gives none.
        num_input_tokens: Tokens of the prompt; None: the model does not tell.
        num_output_tokens: Tokens of this piece; None: the model does not tell.
        num_cached_tokens: Tokens of the prompt that the model had kept; None: the model does not tell.
    """

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: Sequence[AnswerLogprobs] | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None

    @property
    def has_news(self) -> bool:
        """Whether a client sees anything of it; tokens that may begin a stop string, for example, have no text yet."""
        return bool(self.text or self.finish_reason or self.logprobs)


class PieceReader:
    """Reads the responses to one prompt; each has a text for every choice, maybe an empty one.

    Args:
        num_choices: Answers that were asked for.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._ended: set[int] = set()

    def read(self, result: InferResult) -> Iterator[Piece]:
        """The pieces of choices that a response says something new of.

        Raises:
            InternalError: The tensors do not fit together: the model is not what it says.
        """
        try:
            for piece in _pieces(result.outputs, self._num_choices):
                is_told = piece.choice in self._ended
                if is_told and not piece.text:
                    continue
                if piece.finish_reason is not None:
                    self._ended.add(piece.choice)
                yield piece
        except (InvalidArgumentError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise unfit_answer(result.model_name) from error


def unfit_answer(model: str) -> InternalError:
    """The error for a model that is not what it says."""
    return InternalError(f"the model '{model}' answered with tensors that do not fit")


def _pieces(outputs: Mapping[str, WireTensor], num_choices: int) -> Iterator[Piece]:
    texts = _strings(outputs, TEXT_OUTPUT) or []
    if len(texts) > num_choices:
        raise ValueError(f"{len(texts)} texts for {num_choices} choices")
    reasons, logprobs = _strings(outputs, FINISH_REASON), _strings(outputs, LOGPROBS)
    num_input, num_output = _numbers(outputs, NUM_INPUT_TOKENS), _numbers(outputs, NUM_OUTPUT_TOKENS)
    num_cached, ids = _numbers(outputs, NUM_CACHED_TOKENS), _numbers(outputs, OUTPUT_IDS)
    first_id = 0
    for choice, text in enumerate(texts):
        num_tokens = num_output[choice] if num_output else None
        own_ids = ids[first_id : first_id + num_tokens] if ids and num_tokens is not None else []
        first_id += num_tokens or 0
        yield Piece(
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


def _logprobs(text: str, ids: Sequence[int]) -> list[AnswerLogprobs] | None:
    """Of the tokens of a piece, from JSON: for each a map of ids to ``logprob``, ``rank`` and ``decoded_token``.

    The sampled token is the one of ``ids``; where the model does not tell these, the one without a rank, else the
    first.
    """
    maps = json.loads(text) if text else None
    if maps is None:
        return None
    found = []
    for index, by_id in enumerate(maps):
        unranked = next((key for key, one in by_id.items() if one["rank"] is None), next(iter(by_id), ""))
        sampled = str(ids[index]) if index < len(ids) else unranked
        ranked = sorted((one for one in by_id.values() if one["rank"] is not None), key=lambda one: int(one["rank"]))
        found.append(AnswerLogprobs(_token(by_id[sampled]), tuple(map(_token, ranked))))
    return found


def _token(value: Mapping[str, Any]) -> StreamedToken:
    logprob = float(value["logprob"])
    text, data = value["decoded_token"] or "", value.get("bytes")
    return StreamedToken(text, logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB, data)
