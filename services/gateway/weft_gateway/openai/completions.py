"""``/v1/completions``: from a body to prompts, from pieces to OpenAI's objects."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from weft_gateway.errors import RequestError
from weft_gateway.openai.ask import Ask, Prompt, take_common
from weft_gateway.openai.fields import Fields, checked_string, shown
from weft_gateway.openai.generation import CollectedChoice, Usage
from weft_gateway.openai.logprobs import completion_logprobs
from weft_gateway.openai.pieces import Piece
from weft_gateway.openai.sampling import MAX_INT32, is_token_id, take_sampling

MAX_PROMPTS = 128
MAX_PROMPT_CHARS = 16 << 20
MAX_PROMPT_TOKENS = 4 << 20
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """A checked body."""

    ask: Ask
    prompts: Sequence[Prompt]


def parse(body: Mapping[str, Any], headers: Headers) -> CompletionAsk:
    """What a body asks for. Raises RequestError, or DeadlineExceededError for a time of 0."""
    fields = Fields(body)
    sampling = take_sampling(fields)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT32)
    sampling["max_tokens"] = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    prompts = _prompts(fields)
    fields.refuse("echo", why="the prompt does not come back; put it before the answer yourself")
    fields.refuse("suffix")
    best_of = fields.integer("best_of", 1, MAX_PROMPTS)
    num_choices = sampling.get("n", 1)
    if best_of not in (None, num_choices):
        raise RequestError(
            f"'best_of' is {best_of} and 'n' is {num_choices}: answers are not compared; leave 'best_of' out",
            param="best_of",
            code="unsupported_parameter",
        )
    ask = take_common(fields, sampling, headers)
    if len(prompts) * num_choices > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts)} prompts with {num_choices} answers each are {len(prompts) * num_choices}; at most "
            f"{MAX_PROMPTS} are made for one request",
            param="n",
        )
    return CompletionAsk(ask, prompts)


def _prompts(fields: Fields) -> list[Prompt]:
    """A text, several texts, the ids of a text's tokens, or those of several."""
    given = fields.raw("prompt")
    if isinstance(given, str):
        return [checked_string(given, "prompt", max_chars=MAX_PROMPT_CHARS)]
    if not isinstance(given, list) or not given:
        raise RequestError(
            f"'prompt' must be a string, token ids, or an array of either, got {shown(given)}", param="prompt"
        )
    if isinstance(given[0], int):
        return [_token_ids(given, "prompt")]
    prompts: list[Prompt] = []
    for index, one in enumerate(fields.array("prompt", MAX_PROMPTS) or ()):
        param = f"prompt[{index}]"
        if isinstance(one, list) and one:
            prompts.append(_token_ids(one, param))
        else:
            prompts.append(checked_string(one, param, max_chars=MAX_PROMPT_CHARS))
    return prompts


def _token_ids(given: list[Any], param: str) -> list[int]:
    if len(given) > MAX_PROMPT_TOKENS:
        raise RequestError(f"'{param}' has {len(given)} tokens; at most {MAX_PROMPT_TOKENS} are taken", param=param)
    for index, value in enumerate(given):
        if not is_token_id(value):
            place = f"{param}[{index}]"
            raise RequestError(f"'{place}' must be the id of a token, got {shown(value)}", param=place)
    return given


class CompletionWriter:
    """Makes the answers to one request.

    Args:
        model: As the client named it.
        usage: Tokens so far.
        has_usage_chunk: Whether a stream ends with the usage.
    """

    def __init__(self, model: str, usage: Usage, *, has_usage_chunk: bool) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._usage = usage
        self._has_usage_chunk = has_usage_chunk

    def whole(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """The answer as one object."""
        return {
            **self._head,
            "choices": [
                _choice(index, choice.text, choice.finish_reason, completion_logprobs(choice.logprobs, 0))
                for index, choice in enumerate(choices)
            ],
            "usage": self._usage.as_json(),
        }

    async def chunks(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream; ``pieces`` is closed with it, and what it raises is raised."""
        num_chars: dict[int, int] = {}
        between = {"usage": None} if self._has_usage_chunk else {}
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                self._usage.add(piece)
                if not piece.has_news:
                    continue
                start = num_chars.get(piece.choice, 0)
                num_chars[piece.choice] = start + len(piece.text)
                logprobs = completion_logprobs(piece.logprobs, start)
                yield {
                    **self._head,
                    "choices": [_choice(piece.choice, piece.text, piece.finish_reason, logprobs)],
                    **between,
                }
        if self._has_usage_chunk:
            yield {**self._head, "choices": [], "usage": self._usage.as_json()}


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
