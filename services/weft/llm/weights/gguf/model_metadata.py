"""The configuration of a model from the metadata of its GGUF file, as a ``config.json`` has it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.gguf.container import PLAIN_TYPES, GgufFile

_EMBEDDING, _LM_HEAD = "token_embd.weight", "output.weight"
#: Factors of the wavelengths of Llama 3, one for each pair of a head; not a weight.
ROPE_FACTORS = "rope_freqs.weight"
#: Parameters of the only such factors that converters write, but for the largest.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufLayout(NamedTuple):
    """What files of an architecture have that folders have otherwise.

    Attributes:
        architecture: Their ``general.architecture``; "": they are not read.
        names: Modules of a layer whose names in files are not those of most architectures.
        has_pairs: Outputs of queries and keys are in pairs, not in halves of a head.
        norm_offset: Was added to the weights of norms.
        has_window: ``attention.sliding_window`` is read; else it must be absent or 0.
        derived: Fields of ``config.json`` that files do not have, from those that they have.
    """

    architecture: str = ""
    names: Mapping[str, str] = MappingProxyType({})
    has_pairs: bool = False
    norm_offset: float = 0.0
    has_window: bool = False
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


def config_of_gguf(path: Path, classes: Sequence[tuple[GgufLayout, str]]) -> dict[str, Any]:
    """``config.json`` of the model of a GGUF file.

    Args:
        path: The file.
        classes: Layouts, each with its class in transformers.

    Raises:
        InvalidArgumentError: The file is torn, the architecture is not supported, or metadata is missing or wrong.
    """
    with GgufFile.open(path) as file:
        architecture = file.metadata.get("general.architecture")
        found = next((each for each in classes if each[0].architecture == architecture != ""), None)
        if found is None:
            allowed = ", ".join(layout.architecture for layout, _ in classes if layout.architecture)
            raise InvalidArgumentError(
                f"{file.name}: general.architecture must be one of {allowed}, got {architecture!r}; take another model"
            )
        layout, name = found
        config = _Metadata(file, layout).config()
        return {"architectures": [name], **config, **layout.derived(config)}


class _Metadata:
    def __init__(self, file: GgufFile, layout: GgufLayout) -> None:
        self._file = file
        self._architecture = layout.architecture
        self._has_window = layout.has_window

    def config(self) -> dict[str, Any]:
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length", hidden // heads)
        if self._count("attention.value_length", head_dim) != head_dim:
            raise self._fault("attention.value_length", f"the key length, {head_dim}", "another")
        num_layers = self._count("block_count")
        if num_layers > len(self._file.tensors):
            raise self._fault("block_count", f"at most the number of tensors, {len(self._file.tensors)}", num_layers)
        config: dict[str, Any] = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "num_hidden_layers": num_layers,
            "intermediate_size": self._count("feed_forward_length"),
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._vocabulary(),
            "tie_word_embeddings": _LM_HEAD not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "rope_parameters": self._rope(head_dim),
            "dtype": self._dtype(),
            "bos_token_id": self._token("bos"),
            "eos_token_id": [token for token in (self._token("eos"), self._token("eot")) if token is not None],
        }
        if self._has_window:
            config["sliding_window"] = self._count("attention.sliding_window")
        elif type(window := self._value("attention.sliding_window")) not in (int, type(None)) or window:
            raise self._fault("attention.sliding_window", "absent or 0", window)
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "partial_rotary_factor": self._count("rope.dimension_count", head_dim) / head_dim,
        }
        kind = self._value("rope.scaling.type")
        if not isinstance(kind, str | None):
            raise self._fault("rope.scaling.type", "a text", kind)
        if kind not in (None, "none"):
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
            original = self._value("rope.scaling.original_context_length")
            return rope if original is None else rope | {"original_max_position_embeddings": original}
        if ROPE_FACTORS in self._file.tensors:
            rope |= self._llama3(rope["rope_theta"], head_dim)
        return rope

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Parameters that give the factors of the file."""
        tensor = self._file.tensors[ROPE_FACTORS]
        count = head_dim // 2
        if tensor.shape != (count,) or PLAIN_TYPES.get(tensor.type_id) != "float32":
            raise InvalidArgumentError(
                f"{self._file.name}: '{ROPE_FACTORS}' must have shape [{count}] and type F32, got {list(tensor.shape)} "
                f"of type {tensor.type_id}; convert the model again"
            )
        self._file.check_size(ROPE_FACTORS, 4 * count)
        factors = self._file.read(tensor, 4 * count).view(np.float32).astype(np.float64)
        largest = float(factors.max())
        low, high, original = _LLAMA3.values()
        wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wave_lengths - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
            raise InvalidArgumentError(
                f"{self._file.name}: '{ROPE_FACTORS}' must have the factors of Llama 3, got others, up to {largest}; "
                f"take the folder that the file was made of"
            )
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}

    def _vocabulary(self) -> int:
        embedding = self._file.tensors.get(_EMBEDDING)
        if embedding is None or not embedding.shape:
            raise InvalidArgumentError(f"{self._file.name}: '{_EMBEDDING}' is missing; fetch the file again")
        return embedding.shape[0]

    def _dtype(self) -> str:
        """Type of the embedding where that is numbers, else bfloat16."""
        return PLAIN_TYPES.get(self._file.tensors[_EMBEDDING].type_id, "bfloat16")

    def _token(self, name: str) -> int | None:
        token = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token if type(token) is int else None

    def _value(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{name}")

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._value(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self._fault(name, "a whole number above 0, the same for all layers", value)
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._value(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._fault(name, "a number above 0", value)
        return float(value)

    def _fault(self, name: str, allowed: str, got: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._file.name}: {self._architecture}.{name} must be {allowed}, got {got!r}; convert the model again"
        )
