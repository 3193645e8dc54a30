"""Fields that both text endpoints share, and their validation."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from weft.base.errors import DeadlineExceededError
from weft.gateway.errors import RequestError
from weft.gateway.openai.fields import Fields, checked_string, shown

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_STOP_TOKENS = 256
MAX_NAME_CHARS = 64
#: Models use 32-bit token ids and counts.
MAX_INT32 = 2**31 - 1
_SEED_RANGE = (-(2**63), 2**63 - 1)
#: Fields that ask for a grammar; the model reads them, and says what is wrong with one.
GRAMMAR_FIELDS = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def parse_sampling(fields: Fields) -> dict[str, Any]:
    """The sampling fields that both endpoints share, by vLLM's names, without absent ones.

    ``seed``, ``n``, ``stop``, ``temperature``, ``top_p``, both penalties and ``logit_bias`` are OpenAI's; the others
    are extensions of vLLM's server, except ``speculation``, the name of a proposer of drafts.
    Raises RequestError: a value has the wrong type, or is out of range.
    """
    given: dict[str, Any] = {
        "n": fields.integer("n", 1, MAX_CHOICES),
        "temperature": fields.number("temperature", 0.0, 2.0),
        "top_p": fields.number("top_p", 1e-6, 1.0),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0),
        "seed": fields.integer("seed", *_SEED_RANGE),
        "stop": _stops(fields),
        "logit_bias": _biases(fields),
        "top_k": fields.integer("top_k", -1, MAX_INT32),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100.0),
        "min_tokens": fields.integer("min_tokens", 0, MAX_INT32),
        "stop_token_ids": _token_ids(fields, "stop_token_ids", MAX_STOP_TOKENS),
        "ignore_eos": fields.boolean("ignore_eos"),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output"),
        "skip_special_tokens": fields.boolean("skip_special_tokens"),
        "speculation": fields.string("speculation", max_chars=MAX_NAME_CHARS),
        **{name: fields.raw(name) for name in GRAMMAR_FIELDS},
    }
    if given["response_format"] == {"type": "text"}:
        del given["response_format"]
    return {name: value for name, value in given.items() if value is not None}


def is_token_id(value: object) -> bool:
    """Whether a value could be a token id of some model."""
    return type(value) is int and 0 <= value <= MAX_INT32


def _stops(fields: Fields) -> list[str] | None:
    value = fields.raw("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS)
    for index, stop in enumerate(stops or ()):
        param = fields.param(f"stop[{index}]" if isinstance(value, list) else "stop")
        if not checked_string(stop, param, max_chars=MAX_STOP_CHARS):
            raise RequestError(f"'{param}' is empty, and would end every text at once; leave it out", param=param)
    return stops or None


def _biases(fields: Fields) -> dict[str, float] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    given = fields.raw("logit_bias")
    if len(given) > MAX_BIASES:
        raise RequestError(f"'logit_bias' has {len(given)} tokens; at most {MAX_BIASES} are taken", param="logit_bias")
    taken: dict[str, float] = {}
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 11 and is_token_id(int(key))):
            raise RequestError(
                f"'logit_bias' has the key {shown(key)}; a key is the id of a token, for example \"50256\"",
                param="logit_bias",
            )
        bias = biases.number(key, -100.0, 100.0)
        if bias is not None:
            taken[key] = bias
    return taken or None


def _token_ids(fields: Fields, name: str, max_items: int) -> list[int] | None:
    ids = fields.array(name, max_items)
    for index, value in enumerate(ids or ()):
        if not is_token_id(value):
            param = fields.param(f"{name}[{index}]")
            raise RequestError(f"'{param}' must be the id of a token, got {shown(value)}", param=param)
    return ids or None


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
    """Parse the shared fields, and reject unread fields of the body.

    Raises RequestError, or DeadlineExceededError for a timeout of 0.
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
