"""The architectures that can be served, and which one a folder has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.models.gemma3 import Gemma3
from weft.llm.models.llama import Llama
from weft.llm.models.mistral import Mistral
from weft.llm.models.model_config import TransformerConfig, fault
from weft.llm.models.qwen2 import Qwen2
from weft.llm.models.qwen3 import Qwen3
from weft.llm.weights.gguf.container import find_gguf
from weft.llm.weights.gguf.model_metadata import config_of_gguf

#: A new architecture is a module beside this one, and its class here.
ARCHITECTURES: list[type[TransformerConfig]] = [
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
    Gemma3,
]


def read_config(path: Path) -> TransformerConfig:
    """Read the configuration of a Hugging Face folder, or of a folder with a GGUF file.

    Args:
        path: Folder with ``config.json``, or with one ``.gguf`` file and no safetensors. End-of-text tokens of
            ``generation_config.json``, if present, take precedence over those of ``config.json``.

    Raises:
        NotFoundError: There is no ``config.json``.
        InvalidArgumentError: A file is not JSON, or the model is not supported; the message names the field.
    """
    if (gguf := find_gguf(path)) is not None:
        return config_from_json(config_of_gguf(gguf, [(each.gguf, each.architecture) for each in ARCHITECTURES]))
    generation = path / "generation_config.json"
    return config_from_json(
        _read_object(path / "config.json"), _read_object(generation) if generation.is_file() else {}
    )


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TransformerConfig:
    """Convert a parsed ``config.json`` and, optionally, a parsed ``generation_config.json``.

    Raises:
        InvalidArgumentError: The model is not supported; the message names the field.
    """
    named, classes = config.get("architectures"), {each.architecture: each for each in ARCHITECTURES}
    if not isinstance(named, list) or len(named) != 1 or named[0] not in classes:
        raise fault("architectures", f"a list with one of {', '.join(classes)}", named)
    return classes[named[0]].from_json(config, generation)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"no {path.name} in {path.parent}; give the folder of a Hugging Face model") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgumentError(f"{path} must hold a JSON object, got {type(parsed).__name__}")
    return parsed
