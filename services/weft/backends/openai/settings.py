"""Reads the settings of a model of the backend ``openai``, and completes its configuration."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from weft.backends.llm import tensors
from weft.base.errors import FailedPreconditionError, InvalidArgumentError
from weft.base.signature import RESUME_INPUT, TOKENS_FLAG
from weft.serving.backends.base import ModelContext
from weft.serving.backends.parameters import ParameterReader

#: A chat as JSON: a list of messages with ``role`` and ``content``. In its place, a text is the user's message.
MESSAGES = "messages"
#: Of the API ``embeddings``.
EMBEDDING = "embedding"
APIS = ("chat", "completions", "embeddings")
_INPUTS = {
    **{name: tensor for name, tensor in tensors.INPUTS.items() if name not in (RESUME_INPUT, TOKENS_FLAG)},
    MESSAGES: tensors.INPUTS[tensors.TEXT_INPUT],
}
_OUTPUTS = {
    name: tensors.OUTPUTS[name]
    for name in (
        *(tensors.TEXT_OUTPUT, tensors.FINISH_REASON, tensors.CUMULATIVE_LOGPROB, tensors.LOGPROBS),
        *(tensors.NUM_INPUT_TOKENS, tensors.NUM_CACHED_TOKENS, tensors.NUM_OUTPUT_TOKENS),
    )
}
_EMBEDDING_OUTPUTS = (
    {"name": EMBEDDING, "data_type": "TYPE_FP32", "dims": [-1]},
    {"name": tensors.NUM_INPUT_TOKENS, "data_type": "TYPE_UINT32", "dims": [1]},
)


def complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Add every input and output to a configuration; those of a language model are the ones of the backend ``llm``.

    Raises:
        InvalidArgumentError: It declares other tensors, a batch dimension, or sequence batching.
    """
    if config.get("parameters", {}).get("api", {}).get("string_value") != "embeddings":
        return tensors.completed(config, "openai", _INPUTS, _OUTPUTS)
    config.setdefault("input", [{"name": tensors.TEXT_INPUT, "data_type": "TYPE_STRING", "dims": [1]}])
    config.setdefault("output", list(_EMBEDDING_OUTPUTS))
    return config


class Settings(NamedTuple):
    """How the other server is called; docs/engines.md has the parameters, here is what it leaves open.

    Attributes:
        url: Its base, such as ``https://host/v1``, without a slash at the end.
        key: API key; "": none. Never part of a message.
        max_requests: Requests in flight, and connections.
        max_failures: Failures in a row after which the server counts as down until it answers; 0: never.
        max_response_bytes: Of an answer that is not streamed; of a line of a stream.
        tls_ca, tls_cert, tls_key: Files; "": those of the system, and no own certificate.
    """

    url: str
    model: str
    api: str
    key: str
    key_variable: str
    max_requests: int
    connect_timeout_s: float
    read_timeout_s: float
    max_failures: int
    max_tokens_field: str
    max_response_bytes: int
    tls_ca: str
    tls_cert: str
    tls_key: str


def read_settings(model: ModelContext) -> Settings:
    """Read and check the parameters.

    Raises:
        InvalidArgumentError: One is unknown, missing, or its value is not allowed.
        FailedPreconditionError: The environment variable of the key is not set.
    """
    reader = ParameterReader(model)
    url = reader.text("base_url", "").rstrip("/")
    shown = re.sub("//[^/]*@", "//", url)  # without a password
    try:
        parts = urlsplit(shown)
    except ValueError:  # a bracket alone
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or shown != url or parts.query or parts.fragment:
        raise reader.fault("base_url", shown, "http:// or https://, a host and a path such as /v1, and no more")
    settings = Settings(
        url,
        reader.text("model", model.signature.name),
        reader.choice("api", "chat", APIS),
        "",
        reader.text("api_key_env", ""),
        reader.integer("max_requests", 64, minimum=1, maximum=4096),
        _seconds(reader, "connect_timeout_s", 10.0),
        _seconds(reader, "read_timeout_s", 120.0),
        reader.integer("max_failures", 5, minimum=0),
        reader.choice("max_tokens_field", "max_tokens", ("max_tokens", "max_completion_tokens")),
        reader.integer("max_response_bytes", 4 << 20, minimum=1024),
        *(reader.text(name, "") for name in ("tls_ca", "tls_cert", "tls_key")),
    )
    for name in tensors.PARAMETERS:
        reader.text(name, "")  # for clients
    reader.finish()
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise reader.fault("tls_cert", settings.tls_cert, "given together with 'tls_key'")
    return settings._replace(key=_key(model, settings.key_variable))


def _seconds(reader: ParameterReader, name: str, default: float) -> float:
    value = reader.number(name, default)
    if not 0 < value <= 86_400:
        raise reader.fault(name, value, "more than 0 and at most 86400")
    return value


def _key(model: ModelContext, variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise FailedPreconditionError(
            f"model '{model.signature.name}': the environment variable '{variable}' of parameter 'api_key_env' is not "
            "set in the model service; set it to the key, and start the service again"
        )
    if not (key.isascii() and key.isprintable()):
        raise InvalidArgumentError(
            f"model '{model.signature.name}': the key in the environment variable '{variable}' has characters that a "
            "header cannot carry"
        )
    return key
