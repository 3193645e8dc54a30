"""The configuration that a load gives in place of ``config.pbtxt``, as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft_protos.model_config_pb2 import ModelConfig

#: What protobuf's parser in C++, which Triton Inference Server has, takes beside JSON: names without quotes, strings in
#: single quotes, a comma before the end. Strings in double quotes match first, and stay. A string that nothing closes
#: goes on to the end: were it no match, the next quote would be tried, and so on, in quadratic time.
_LENIENT = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|(\'(?:\\.|[^\'\\])*(?:\'|\\?\Z))|([A-Za-z_]\w*)|(,)(?=\s*[}\]])', re.DOTALL
)
_MAX_CONFIG_CHARS = 1 << 20
_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def config_override(name: str, parameters: Mapping[str, ParameterValue | bytes]) -> str | None:
    """The configuration in the parameters of a load, in place of ``config.pbtxt``. Raises for other parameters."""
    for key in parameters:
        if key.startswith("file:"):
            raise UnsupportedError(
                f"failed to load '{name}': parameter '{key}' is not supported by this version: a restart would not "
                "have the file; put the file into the repository"
            )
        if key != "config":
            raise InvalidArgumentError(f"failed to load '{name}': unknown parameter '{key}'; a load takes 'config'")
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InvalidArgumentError(
            f"failed to load '{name}': parameter 'config' must be a string, a configuration in JSON"
        )
    if config is not None and len(config) > _MAX_CONFIG_CHARS:
        raise InvalidArgumentError(
            f"failed to load '{name}': parameter 'config' has {len(config)} characters, {_MAX_CONFIG_CHARS} are "
            "allowed; put the configuration into the repository"
        )
    return config


def parse_override(text: str) -> ModelConfig:
    """The configuration in JSON, read as protobuf's parser in C++ reads it; else InvalidArgumentError.

    Of a name that comes twice the last counts, and one value stands for a list of it.
    """
    try:
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            data = json.loads(_LENIENT.sub(_to_json, text))
        if not isinstance(data, dict):
            raise json_format.ParseError(f"it is a {type(data).__name__}, not an object")
        return json_format.ParseDict(_with_lists(data, ModelConfig.DESCRIPTOR), ModelConfig())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"parameter 'config' is not a model configuration in JSON: {error}") from None


def _to_json(match: re.Match[str]) -> str:
    single, word, comma = match.groups()
    if single is not None:
        inner = single[1:-1].replace("\\'", "'")
        return f'"{_QUOTE.sub(lambda found: found[0] if len(found[0]) == 2 else chr(92) + found[0], inner)}"'
    if word is not None:
        return word if word in ("true", "false", "null") else f'"{word}"'
    return "" if comma is not None else match[0]


def _with_lists(data: Mapping[str, Any], message: Descriptor) -> dict[str, Any]:
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    return {key: value if key not in fields else _value(fields[key], value) for key, value in data.items()}


def _value(field: Any, value: Any) -> Any:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        of_value = inner.fields_by_name["value"]
        return {k: _value(of_value, v) for k, v in value.items()} if isinstance(value, dict) else value
    if field.is_repeated and not isinstance(value, list) and value is not None:
        value = [value]
    if inner is None:
        return value
    if isinstance(value, list):
        return [_with_lists(item, inner) if isinstance(item, dict) else item for item in value]
    return _with_lists(value, inner) if isinstance(value, dict) else value
