"""Fields that the endpoints that generate text share, and their validation."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from weft.base.errors import DeadlineExceededError
from weft.gateway.errors import RequestError
from weft.gateway.openai.fields import (
    Field,
    Fields,
    boolean,
    checked_string,
    ignored,
    integer,
    nested,
    number,
    shown,
    string,
    unsupported,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_STOP_TOKENS = 256
MAX_NAME_CHARS = 64
MAX_LOGPROBS = 20
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


def _grammar(fields: Fields, name: str) -> Any:
    """What a field asks for; None if that is any text."""
    value = fields.raw(name)
    return None if value == {"type": "text"} else value


def is_token_id(value: object) -> bool:
    """Whether a value could be a token id of some model."""
    return type(value) is int and 0 <= value <= MAX_INT32


def parse_stops(fields: Fields, name: str) -> list[str] | None:
    """A stop string, or several. Raises RequestError."""
    value = fields.raw(name)
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else fields.array(name, MAX_STOPS)
    for index, stop in enumerate(stops or ()):
        param = fields.param(f"{name}[{index}]" if isinstance(value, list) else name)
        if not checked_string(stop, param, max_chars=MAX_STOP_CHARS):
            raise RequestError(f"'{param}' is empty, and would end every text at once; leave it out", param=param)
    return stops or None


def _biases(fields: Fields, name: str) -> dict[str, float] | None:
    biases = fields.object(name)
    if biases is None:
        return None
    given = fields.raw(name)
    if len(given) > MAX_BIASES:
        raise RequestError(f"'{name}' has {len(given)} tokens; at most {MAX_BIASES} are taken", param=name)
    taken: dict[str, float] = {}
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 11 and is_token_id(int(key))):
            raise RequestError(
                f"'{name}' has the key {shown(key)}; a key is the id of a token, for example \"50256\"", param=name
            )
        bias = biases.number(key, -100.0, 100.0)
        if bias is not None:
            taken[key] = bias
    return taken or None


def _token_ids(fields: Fields, name: str) -> list[int] | None:
    ids = fields.array(name, MAX_STOP_TOKENS)
    for index, value in enumerate(ids or ()):
        if not is_token_id(value):
            param = fields.param(f"{name}[{index}]")
            raise RequestError(f"'{param}' must be the id of a token, got {shown(value)}", param=param)
    return ids or None


#: Sampling parameters that endpoints share, by vLLM's names; absent ones are left to the model.
SAMPLING = (
    integer("n", 1, MAX_CHOICES, "answers to each prompt", "1"),
    number("temperature", 0.0, 2.0, "0: always the most likely token", "1, or the model's"),
    number("top_p", 1e-6, 1.0, "sample from the most likely tokens of this probability", "1, or the model's"),
    number("presence_penalty", -2.0, 2.0, "against tokens that the answer has", "0"),
    number("frequency_penalty", -2.0, 2.0, "against tokens, for each time that the answer has them", "0"),
    integer("seed", *_SEED_RANGE, "the same seed and request give the same answer"),
    Field("stop", f"string, or up to {MAX_STOPS} strings", "where the answer ends", read=parse_stops),
    Field("logit_bias", "object of token ids and numbers, -100 to 100", "added to logits", read=_biases),
    integer("top_k", -1, MAX_INT32, "sample from so many tokens; -1 or 0: from all", "-1, or the model's"),
    number("min_p", 0.0, 1.0, "least share of the most likely token's probability", "0"),
    number("repetition_penalty", 0.01, 100.0, "against tokens that prompt or answer has", "1, or the model's"),
    integer("min_tokens", 0, MAX_INT32, "no end before so many tokens", "0"),
    Field("stop_token_ids", f"up to {MAX_STOP_TOKENS} token ids", "tokens that end the answer", read=_token_ids),
    boolean("ignore_eos", "the end token does not end the answer"),
    boolean("include_stop_str_in_output", "the answer has the stop string"),
    boolean("skip_special_tokens", "special tokens are left out of the text", "true"),
    Field("bad_words", "array of strings", "texts that the answer must not have", read=Fields.raw),
    Field("allowed_token_ids", "array of token ids", "the tokens that the answer may have", read=Fields.raw),
    integer("truncate_prompt_tokens", -1, MAX_INT32, "keep so many of the last tokens of a prompt; -1: as many as fit"),
    string("speculation", MAX_NAME_CHARS, "`none`, or the model's proposer of drafts; the text is the same"),
    *(Field(name, effect="a [grammar](structured-output.md)", read=_grammar) for name in GRAMMAR_FIELDS),
)

#: Further ones of the endpoints with choices. The model refuses what they do not go together with.
SEARCH = (
    integer("best_of", 1, MAX_CHOICES, "answers that are made, of which the `n` likeliest come; not streamed", "`n`"),
    boolean("use_beam_search", "the `n` best of a search of the width `best_of`; nothing is sampled, nor streamed"),
    number("length_penalty", -100.0, 100.0, "the search divides by the length to this power", "1"),
    Field("early_stopping", "boolean, or `never`", "when the search ends", "false", Fields.raw),
    integer("prompt_logprobs", 0, MAX_LOGPROBS, "report so many of the likeliest tokens in the prompt; not streamed"),
)

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


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A validated request.

    Attributes:
        sampling: Sampling parameters for the model, as JSON; ``logprobs`` only if requested.
        has_usage_chunk: Whether a stream ends with a chunk that has the usage.
        parameters: Request parameters: ``priority``, ``cache_salt`` and ``parse_special_tokens``, if given, and those
            that the endpoint adds.
        timeout_s: Timeout in seconds; None: that of the gateway.
        has_continuous_usage: Whether each chunk of a stream has the usage so far.
        messages: The chat as JSON, for a model that takes it so; "": there is none.
        has_echo: Whether the prompt goes before each answer.
        prompts: What the model continues; those of a chat are written by its template first.
    """

    model: str
    sampling: Mapping[str, Any]
    is_stream: bool
    has_usage_chunk: bool
    parameters: Mapping[str, int | str]
    timeout_s: float | None
    has_continuous_usage: bool = False
    messages: str = ""
    has_echo: bool = False
    prompts: Sequence[Prompt] = ()

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return int(self.sampling.get("n", 1))

    def of_one_choice(self) -> "list[TextRequest]":
        """A request for each choice; a seed goes on from one to the next, so that the answers differ."""
        given = {name: value for name, value in self.sampling.items() if name != "n"}
        seed = given.get("seed")
        seeds = [{} if seed is None else {"seed": min(seed + i, _SEED_RANGE[1])} for i in range(self.num_choices)]
        return [replace(self, sampling=given | own) for own in seeds]


def _model(fields: Fields, name: str) -> str:
    model = fields.string(name, max_chars=MAX_MODEL_CHARS)
    if not model:
        raise RequestError("'model' is missing; GET /v1/models lists what is served", param=name)
    if not model.isprintable():
        raise RequestError("'model' has characters that cannot be shown; leave them out", param=name)
    return model


#: Of every endpoint.
MODEL = Field("model", "string", "name of a model or graph", "required", _model)
TIMEOUT = Field(
    "timeout",
    f"number, 0 to {MAX_TIMEOUT_S:g}",
    f"seconds for the answer, also as the header `{TIMEOUT_HEADER}`; the shortest counts, with the gateway's",
    "the gateway's",
    Fields.raw,
)
PRIORITY = integer("priority", 0, MAX_PRIORITY, "a smaller number is served sooner, 0 is the default level", "0")
#: Fields of OpenAI without effect here: user identity, storage and billing on OpenAI's servers.
IGNORED = ignored("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user")
SERVICE_TIER = unsupported("service_tier", harmless=("auto", "default"))
#: Of every interface that generates text.
CORE = (
    MODEL,
    boolean("stream", "server-sent events"),
    PRIORITY,
    string("cache_salt", MAX_SALT_CHARS, "requests with different salts share no cached prefix"),
    boolean(PARSES_SPECIAL_TOKENS, "special tokens in what users write are special, else text"),
    TIMEOUT,
)
COMMON = (
    *CORE,
    nested(
        "stream_options",
        (
            boolean("include_usage", "a last chunk has the usage"),
            boolean("continuous_usage_stats", "each chunk has the usage so far"),
            *ignored("include_obfuscation"),
        ),
        "needs `stream`",
    ),
    SERVICE_TIER,
    *IGNORED,
)
#: Of vLLM and OpenAI, for what would change the answer.
UNSUPPORTED = (
    unsupported("logits_processors", "use 'logit_bias'"),
    unsupported("return_tokens_as_token_ids", "'logprobs' have the bytes of each token"),
    unsupported("return_token_ids", "POST /tokenize has the ids of a text"),
)
_PARAMETERS = ("priority", "cache_salt", PARSES_SPECIAL_TOKENS)


def parse_common(
    fields: Fields, sampling: Mapping[str, Any], headers: Mapping[str, str], given: Mapping[str, Any] | None = None
) -> TextRequest:
    """Parse the shared fields, or take their values as ``given``.

    Raises RequestError, or DeadlineExceededError for a timeout of 0.
    """
    if given is None:
        given = fields.read(COMMON)
    nothing = {
        "best_of": sampling.get("n", 1),
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
    }
    sampling = {name: value for name, value in sampling.items() if name not in nothing or value != nothing[name]}
    is_stream, options = given.get("stream", False), given.get("stream_options", {})
    if "stream_options" in given and not is_stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
    if is_stream and "prompt_logprobs" in sampling:
        raise RequestError("'prompt_logprobs' cannot be streamed; set 'stream' to false", param="prompt_logprobs")
    return TextRequest(
        given["model"],
        sampling,
        is_stream,
        options.get("include_usage", False),
        {name: given[name] for name in _PARAMETERS if name in given},
        timeout_s(fields, headers),
        has_continuous_usage=options.get("continuous_usage_stats", False),
    )


def timeout_s(fields: Fields, headers: Mapping[str, str]) -> float | None:
    """The shorter of the field ``timeout`` and the header, in seconds; None: neither is given."""
    given = [fields.number("timeout", 0.0, MAX_TIMEOUT_S)]
    if text := headers.get(TIMEOUT_HEADER):
        try:
            given.append(Fields({TIMEOUT_HEADER: float(text)}).number(TIMEOUT_HEADER, 0.0, MAX_TIMEOUT_S))
        except ValueError:
            raise RequestError(
                f"the header '{TIMEOUT_HEADER}' must be a number of seconds, got '{text[:40]}'"
            ) from None
    least_s = min((one for one in given if one is not None), default=None)
    if least_s == 0:
        raise DeadlineExceededError("the client gives the answer 0 s; give more, or leave 'timeout' out")
    return least_s
