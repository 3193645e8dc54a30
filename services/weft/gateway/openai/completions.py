"""``/v1/completions``: parses the body and formats responses."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from weft.gateway.errors import RequestError
from weft.gateway.json_text import parse_json
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Fields, checked_string, shown
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, ResponseForm, completion_logprobs, text_response
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import MAX_INT32, Prompt, TextRequest, is_token_id, parse_common, parse_sampling

MAX_PROMPTS = 128
MAX_PROMPT_CHARS = 16 << 20
MAX_PROMPT_TOKENS = 4 << 20
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated body."""

    common: TextRequest
    prompts: Sequence[Prompt]

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.common.model


def parse(data: bytes, headers: Mapping[str, str]) -> CompletionRequest:
    """Parse a body of JSON. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    fields = Fields(parse_json(data))
    sampling = parse_sampling(fields)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT32)
    sampling["max_tokens"] = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    prompts = _prompts(fields)
    fields.reject("echo", why="the prompt does not come back; put it before the answer yourself")
    fields.reject("suffix")
    best_of = fields.integer("best_of", 1, MAX_PROMPTS)
    num_choices = sampling.get("n", 1)
    if best_of not in (None, num_choices):
        raise RequestError(
            f"'best_of' is {best_of} and 'n' is {num_choices}: answers are not compared; leave 'best_of' out",
            param="best_of",
            code="unsupported_parameter",
        )
    common = parse_common(fields, sampling, headers)
    if len(prompts) * num_choices > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts)} prompts with {num_choices} answers each are {len(prompts) * num_choices}; at most "
            f"{MAX_PROMPTS} are made for one request",
            param="n",
        )
    return CompletionRequest(common, prompts)


def _prompts(fields: Fields) -> list[Prompt]:
    """Prompts: one text, several texts, one list of token ids, or several lists."""
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


def _token_ids(given: list[Any], param: str) -> "array[int]":
    if len(given) > MAX_PROMPT_TOKENS:
        raise RequestError(f"'{param}' has {len(given)} tokens; at most {MAX_PROMPT_TOKENS} are taken", param=param)
    for index, value in enumerate(given):
        if not is_token_id(value):
            place = f"{param}[{index}]"
            raise RequestError(f"'{place}' must be the id of a token, got {shown(value)}", param=place)
    return array("i", given)


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def _respond(request: CompletionRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    num_chars = Counter[int]()

    def choice(index: int, choice: CollectedChoice) -> dict[str, Any]:
        return _choice(index, choice.text, choice.finish_reason, completion_logprobs(choice.logprobs, 0))

    def delta_choices(delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        logprobs = completion_logprobs(delta.logprobs, num_chars[delta.choice])
        num_chars[delta.choice] += len(delta.text)
        yield _choice(delta.choice, delta.text, delta.finish_reason, logprobs)

    form = ResponseForm("cmpl-", "text_completion", "text_completion", choice, delta_choices)
    return await text_response(call, model, request.common, request.prompts, form)


ENDPOINT = Endpoint("/v1/completions", TextModel, parse, _respond)
