"""The table of supported architectures, and reading of a folder's configuration."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import NotFoundError
from weft.llm.models.fields import fault
from weft.llm.models.foreign import foreign_config
from weft.llm.models.gemma import Gemma2, Gemma3
from weft.llm.models.gpt_oss import GptOss
from weft.llm.models.granite import Granite
from weft.llm.models.llama import Llama, Mistral, Mixtral
from weft.llm.models.mimo import Mimo
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.olmo2 import Olmo2
from weft.llm.models.phi3 import Phi3
from weft.llm.models.qwen import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe
from weft.llm.weights.folder_source import FolderSource
from weft.llm.weights.gguf import config_of_gguf, find_gguf
from weft.llm.weights.parts import read_object

if TYPE_CHECKING:
    from weft.llm.weights.gguf_source import GgufSource

#: A new architecture is a module beside this one, and its class here. Others run through transformers.
ARCHITECTURES: list[type[TransformerConfig]] = [
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
    Gemma2,
    Gemma3,
    GptOss,
    Granite,
    Mimo,
    Olmo2,
    Phi3,
    Mixtral,
    Qwen2Moe,
    Qwen3Moe,
]


def read_config(path: Path) -> TransformerConfig:
    """Read the configuration of a Hugging Face folder, or of a folder with one ``.gguf`` file and no safetensors.

    End-of-text tokens of ``generation_config.json`` take precedence over those of ``config.json``.

    Raises:
        NotFoundError: There is no ``config.json``.
        InvalidArgumentError: A file is not JSON, or the model is not supported; the message names the field.
    """
    if (gguf := find_gguf(path)) is not None:
        return config_from_json(config_of_gguf(gguf, [(each.gguf, each.architecture) for each in ARCHITECTURES]))
    config = read_object(path / "config.json")
    if config is None:
        raise NotFoundError(f"no config.json in {path}; give the folder of a Hugging Face model")
    return config_from_json(config, read_object(path / "generation_config.json"))


@contextmanager
def open_weights(
    path: Path, config: TransformerConfig, *, has_values: bool = True
) -> "Iterator[FolderSource | GgufSource]":
    """Open the weights of a folder, whose names, shapes and types are checked; with values torch is imported.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is truncated; a tensor is missing, unexpected or of another shape; or the format is
            not supported.
    """
    if (gguf := find_gguf(path)) is not None:
        from weft.llm.weights.gguf_source import GgufSource  # noqa: PLC0415  # imports torch

        opened: Any = GgufSource.open(gguf, config.gguf, config.head_dim)
    else:
        opened = FolderSource.open(path, has_values=has_values)
    with opened as source:
        source.check([part for parts in config.weight_parts().values() for part in parts], config.derived_tensors())
        yield source


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TransformerConfig:
    """Convert a parsed ``config.json`` and, optionally, a parsed ``generation_config.json``.

    Raises:
        InvalidArgumentError: The model is not supported; the message names the field.
    """
    named, classes = config.get("architectures"), {each.architecture: each for each in ARCHITECTURES}
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise fault("architectures", f"a list with one name, such as {', '.join(classes)}", named)
    if named[0] in classes:
        return classes[named[0]].from_json(config, generation)
    return foreign_config(named[0], config, generation)
