"""OpenAI's sampling fields as JSON for the tensor ``sampling_parameters``."""

from typing import Any

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


def parse_sampling(fields: Fields) -> dict[str, Any]:
    """The sampling fields that both endpoints share, by vLLM's names, without absent ones.

    ``seed``, ``n``, ``stop``, ``temperature``, ``top_p``, both penalties and ``logit_bias`` are OpenAI's; the others
    are extensions of vLLM's server, except ``speculation``, the name of a proposer of drafts.

    Raises:
        RequestError: A value has the wrong type, or is out of range.
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
    }
    return {name: value for name, value in given.items() if value is not None}


def is_token_id(value: object) -> bool:
    """Whether it is a possible token id of any model."""
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
