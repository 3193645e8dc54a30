"""Fields that both endpoints share, and their validation."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from weft.base.errors import DeadlineExceededError
from weft.gateway.errors import RequestError
from weft.gateway.openai.fields import Fields

#: Text or token ids.
Prompt: TypeAlias = "str | array[int]"

#: Field, and parameter of the model: whether special tokens in what users write are special.
PARSES_SPECIAL_TOKENS = "parse_special_tokens"

MAX_MODEL_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PRIORITY = 2**31 - 1
#: Largest accepted timeout, in seconds.
MAX_TIMEOUT_S = 86_400.0
#: HTTP header with the client's timeout, in seconds.
TIMEOUT_HEADER = "x-request-timeout"

#: Fields of OpenAI without effect here: user identity, storage and billing on OpenAI's servers.
_IGNORED = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A validated request.

    Attributes:
        model: Name of the model or graph.
        sampling: Sampling parameters for the model, as JSON; ``logprobs`` only if requested.
        is_stream: Whether to stream the response.
        has_usage_chunk: Whether a stream ends with a chunk that has the usage.
        parameters: Request parameters: ``priority``, ``cache_salt`` and ``parse_special_tokens``, if given, and those
            that the endpoint adds.
        timeout_s: Timeout in seconds; None: that of the gateway.
    """

    model: str
    sampling: Mapping[str, Any]
    is_stream: bool
    has_usage_chunk: bool
    parameters: Mapping[str, int | str]
    timeout_s: float | None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return int(self.sampling.get("n", 1))


def parse_common(fields: Fields, sampling: Mapping[str, Any], headers: Mapping[str, str]) -> TextRequest:
    """Parse the fields that both endpoints share, and reject fields of the body that nobody has parsed.

    Raises:
        RequestError: A field is invalid, missing, unsupported or unknown.
        DeadlineExceededError: The timeout is 0.
    """
    model = fields.string("model", max_chars=MAX_MODEL_CHARS)
    if not model:
        raise RequestError("'model' is missing; GET /v1/models lists what is served", param="model")
    if not model.isprintable():
        raise RequestError("'model' has characters that cannot be shown; leave them out", param="model")
    is_stream = fields.boolean("stream") or False
    has_usage_chunk = False
    options = fields.object("stream_options")
    if options is not None:
        if not is_stream:
            raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
        has_usage_chunk = options.boolean("include_usage") or False
        options.reject("include_obfuscation")
        options.finish()
    given = {
        "priority": fields.integer("priority", 0, MAX_PRIORITY),
        "cache_salt": fields.string("cache_salt", max_chars=MAX_SALT_CHARS),
        PARSES_SPECIAL_TOKENS: fields.boolean(PARSES_SPECIAL_TOKENS),
    }
    timeout_s = _timeout_s(fields, headers)
    fields.reject("service_tier", ("auto", "default"))
    fields.ignore(*_IGNORED)
    fields.finish()
    parameters = {name: value for name, value in given.items() if value is not None}
    return TextRequest(model, sampling, is_stream, has_usage_chunk, parameters, timeout_s)


def _timeout_s(fields: Fields, headers: Mapping[str, str]) -> float | None:
    """The shorter of the field ``timeout`` and the header, in seconds; None: neither is given."""
    given = [fields.number("timeout", 0.0, MAX_TIMEOUT_S)]
    if text := headers.get(TIMEOUT_HEADER):
        try:
            given.append(Fields({TIMEOUT_HEADER: float(text)}).number(TIMEOUT_HEADER, 0.0, MAX_TIMEOUT_S))
        except ValueError:
            raise RequestError(
                f"the header '{TIMEOUT_HEADER}' must be a number of seconds, got '{text[:40]}'"
            ) from None
    timeout_s = min((one for one in given if one is not None), default=None)
    if timeout_s == 0:
        raise DeadlineExceededError("the client gives the answer 0 s; give more, or leave 'timeout' out")
    return timeout_s
