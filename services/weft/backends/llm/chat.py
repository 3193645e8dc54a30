"""Chat template and special tokens of a Hugging Face folder, published as model parameters for clients."""

import json
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError

CHAT_TEMPLATE = "chat_template"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
#: Texts of all special tokens, a JSON list, which clients keep out of what users write.
ALL_SPECIAL_TOKENS = "special_tokens"
#: Names of these parameters. The engine does not read them.
PARAMETERS = (CHAT_TEMPLATE, ALL_SPECIAL_TOKENS, *SPECIAL_TOKENS)

_CONFIG, _TEMPLATE, _TOKENIZER = "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"
#: Name of the default among several templates.
_DEFAULT = "default"


def chat_parameters(directory: Path) -> dict[str, str]:
    """The chat template, and the special tokens that it may refer to, as far as the folder defines them.

    A template in a separate file takes precedence over that of the tokenizer's configuration; of several, the default
    one is returned.

    Args:
        directory: Version folder of a model.

    Raises:
        InvalidArgumentError: A file cannot be read, or the configuration is not a JSON object.
    """
    config = _object(directory / _CONFIG)
    said = {name: _text_of(config.get(name)) for name in SPECIAL_TOKENS}
    said[CHAT_TEMPLATE] = _read(directory / _TEMPLATE) or _template_of(config.get(CHAT_TEMPLATE))
    added = _object(directory / _TOKENIZER).get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    if special := [one["content"] for one in tokens if one.get("special") and isinstance(one.get("content"), str)]:
        said[ALL_SPECIAL_TOKENS] = json.dumps(special, ensure_ascii=False)
    return {name: value for name, value in said.items() if value is not None}


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty without the file. Raises InvalidArgumentError."""
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} must be a JSON object, got {type(value).__name__}")
    return value


def _read(path: Path) -> str | None:
    """The text of a file; None if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(value: Any) -> str | None:
    """The template, or the default of several named ones."""
    if isinstance(value, list):
        by_name = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = by_name.get(_DEFAULT)
    return value if isinstance(value, str) else None
