"""``/v1/completions``: parses the body and formats responses."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from weft.gateway.errors import RequestError
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, boolean, checked_string, integer, shown, unsupported
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, completion_logprobs
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import (
    COMMON,
    MAX_INT32,
    MAX_LOGPROBS,
    SAMPLING,
    SEARCH,
    UNSUPPORTED,
    Prompt,
    TextRequest,
    is_token_id,
    parse_common,
)
from weft.gateway.openai.writing import ResponseForm, text_response

MAX_PROMPTS = 128
MAX_PROMPT_CHARS = 16 << 20
MAX_PROMPT_TOKENS = 4 << 20
DEFAULT_MAX_TOKENS = 16


def prompts(fields: Fields, name: str, max_items: int = MAX_PROMPTS) -> list[Prompt]:
    """One text, several texts, one list of token ids, or several lists. Raises RequestError."""
    given = fields.raw(name)
    if isinstance(given, str):
        return [checked_string(given, name, max_chars=MAX_PROMPT_CHARS)]
    if not isinstance(given, list) or not given:
        raise RequestError(
            f"'{name}' must be a string, token ids, or an array of either, got {shown(given)}", param=name
        )
    if isinstance(given[0], int):
        return [token_ids(given, name)]
    found: list[Prompt] = []
    for index, one in enumerate(fields.array(name, max_items) or ()):
        param = f"{name}[{index}]"
        if isinstance(one, list) and one:
            found.append(token_ids(one, param))
        else:
            found.append(checked_string(one, param, max_chars=MAX_PROMPT_CHARS))
    return found


def token_ids(given: list[Any], param: str) -> "array[int]":
    """An array of token ids. Raises RequestError."""
    if len(given) > MAX_PROMPT_TOKENS:
        raise RequestError(f"'{param}' has {len(given)} tokens; at most {MAX_PROMPT_TOKENS} are taken", param=param)
    for index, value in enumerate(given):
        if not is_token_id(value):
            place = f"{param}[{index}]"
            raise RequestError(f"'{place}' must be the id of a token, got {shown(value)}", param=place)
    return array("i", given)


_FIELDS = (
    Field("prompt", "string, token ids, or an array of either", "answered concurrently", "required", prompts),
    integer("max_tokens", 0, MAX_INT32, "most tokens of an answer; 0: none, for `echo`", str(DEFAULT_MAX_TOKENS)),
    integer("logprobs", 0, MAX_LOGPROBS, "report so many of the most likely tokens at each place"),
    boolean("echo", "the prompt goes before the answer, its tokens before those of `logprobs`"),
    unsupported("suffix", "put what follows into the prompt, as the model was trained to see it"),
)


def parse(fields: Fields, headers: Mapping[str, str]) -> TextRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    sampling, own = fields.read((*SAMPLING, *SEARCH, *UNSUPPORTED)), fields.read(_FIELDS)
    sampling["max_tokens"] = own.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "logprobs" in own:
        sampling["logprobs"] = own["logprobs"]
    num_choices = max(sampling.get("n", 1), sampling.get("best_of", 1))
    request = replace(parse_common(fields, sampling, headers), prompts=own["prompt"])
    if own.get("echo"):
        scores = {"prompt_logprobs": own["logprobs"]} if "logprobs" in own else {}
        request = replace(request, sampling=scores | sampling, has_echo=True)
    num_prompts = len(own["prompt"])
    if num_prompts * num_choices > MAX_PROMPTS:
        raise RequestError(
            f"{num_prompts} prompts with {num_choices} answers each are {num_prompts * num_choices}; at most "
            f"{MAX_PROMPTS} are made for one request",
            param="n",
        )
    return request


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def _respond(request: TextRequest, model: TextModel, call: EndpointCall) -> ASGIApp:
    num_chars = Counter[int]()

    def logprobs_of(part: CollectedChoice | ChoiceDelta, text_offset: int) -> dict[str, Any] | None:
        tokens = part.logprobs
        if tokens is not None and part.prompt_logprobs and request.has_echo:
            tokens = [*part.prompt_logprobs.tokens, *tokens]
            first = tokens[0]["token"]  # a special token, which begins a prompt, is not in its text
            text_offset -= 0 if part.text.startswith(first) else len(first)
        return completion_logprobs(tokens, text_offset)

    def choice(index: int, choice: CollectedChoice) -> dict[str, Any]:
        written = _choice(index, choice.text, choice.finish_reason, logprobs_of(choice, 0))
        return written | ({"prompt_logprobs": choice.prompt_logprobs.by_id} if choice.prompt_logprobs else {})

    def delta_choices(delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        logprobs = logprobs_of(delta, num_chars[delta.choice])
        num_chars[delta.choice] += len(delta.text)
        yield _choice(delta.choice, delta.text, delta.finish_reason, logprobs)

    form = ResponseForm("cmpl-", "text_completion", "text_completion", choice, delta_choices)
    return await text_response(call, model, request, form)


_ALL_FIELDS = (*_FIELDS, *SAMPLING, *SEARCH, *COMMON, *UNSUPPORTED)
ENDPOINT = Endpoint("/v1/completions", TextModel, parse, _respond, _ALL_FIELDS, operation="text_completion")
