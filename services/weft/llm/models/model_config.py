"""Architecture of a Llama-like model, from the ``config.json`` of its Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.models.rope_config import checked_rope, rope_of_config
from weft.llm.weights.gguf.container import find_gguf
from weft.llm.weights.gguf.model_metadata import config_of_gguf

#: Bytes per element of each type of weights and KV cache.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Types of 8-bit codes of a KV cache, which have a float32 scale for each token and head.
KV_CODES = ("int8", "fp8")
_KV_SCALE_BYTES = 4

_LLAMA, _QWEN2, _QWEN3, _MISTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
#: Defaults of transformers for absent fields, by architecture.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _LLAMA: {"max_position_embeddings": 2048},
    _QWEN2: {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    _QWEN3: {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    _MISTRAL: {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}
_ACTIVATIONS = ("silu", "swish")
#: Most layers and positions: tables grow with them, and a file may claim any number.
_MAX_LAYERS, _MAX_CONTEXT_LEN = 4096, 2**24
_SLIDING, _FULL = "sliding_attention", "full_attention"
_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """Everything about a model that is not in its weights.

    Attributes:
        architecture: Class name in transformers, one of ``LlamaForCausalLM``, ``Qwen2ForCausalLM``,
            ``Qwen3ForCausalLM``, ``MistralForCausalLM``. Informational: the other fields describe the differences.
        vocab_size: Rows of the embedding and of the logits.
        hidden_size: Width of the residual stream.
        intermediate_size: Inner width of the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of a head, even. Need not be ``hidden_size / num_heads``.
        rope: Rotary embedding as in ``rope_parameters`` of transformers: ``rope_type`` (``default``, ``linear``,
            ``dynamic``, ``yarn``, ``llama3``), ``rope_theta`` and the parameters of the type.
        rms_norm_eps: Added to the mean square in every norm.
        max_position_embeddings: Context length in training, in tokens.
        tie_word_embeddings: The LM head shares the embedding's weight.
        has_qk_norm: Queries and keys are normed per head before the rotary embedding.
        has_qkv_bias: The query, key and value projections have a bias.
        has_output_bias: The output projection of attention has a bias.
        sliding_window: Tokens that a token attends to, including itself, in ``sliding_layers``. 0: all.
        sliding_layers: Whether each layer uses the window. Empty: all layers do, if there is one.
        eos_token_ids: End-of-text tokens. Those of a file that are outside of the vocabulary are left out.
        bos_token_id: Beginning-of-text token; None: there is none.
        dtype: Type of the published weights: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        InvalidArgumentError: A value is missing, not of its type, out of range or not supported.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    architecture: str = _LLAMA
    rope: dict[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise _fault(name, "a whole number above 0", value)
        if type(self.rms_norm_eps) is not float or not 0 < self.rms_norm_eps < 1:
            raise _fault("rms_norm_eps", "a number above 0 and below 1", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise _fault("num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads)
        if self.head_dim % 2:
            raise _fault("head_dim", "even, because positions rotate pairs of numbers", self.head_dim)
        if type(self.sliding_window) is not int or self.sliding_window < 0:
            raise _fault("sliding_window", "a whole number of tokens, 0 for none", self.sliding_window)
        if len(self.sliding_layers) not in (0, self.num_layers):
            raise _fault("sliding_layers", f"one for each of {self.num_layers} layers, or none", self.sliding_layers)
        if self.dtype not in DTYPE_BYTES:
            raise _fault("dtype", f"one of {', '.join(DTYPE_BYTES)}", self.dtype)
        object.__setattr__(self, "rope", checked_rope(self.rope))
        if self.max_context_len > _MAX_CONTEXT_LEN:
            allowed = f"at most {_MAX_CONTEXT_LEN}, extension by rope_parameters included"
            raise _fault("max_position_embeddings", allowed, self.max_context_len)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of each layer, in tokens; 0: full attention."""
        is_sliding = self.sliding_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if slides else 0 for slides in is_sliding)

    @property
    def max_context_len(self) -> int:
        """Context length in tokens: as trained, or as extended by the type of rotary embedding.

        Type ``dynamic`` rescales as the context grows, which would invalidate stored keys; it is limited to the trained
        length, where it has no effect.
        """
        trained, rope = self.max_position_embeddings, self.rope
        if rope["rope_type"] == "linear":
            return max(trained, int(trained * rope["factor"]))
        if rope["rope_type"] == "yarn":
            return max(trained, int(rope["original_max_position_embeddings"] * rope["factor"]))
        return trained

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token's keys and values in all layers, stored as ``dtype``, of ``DTYPE_BYTES`` or ``KV_CODES``."""
        head_bytes = self.head_dim + _KV_SCALE_BYTES if dtype in KV_CODES else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Read the configuration of a Hugging Face folder, or of a folder with a GGUF file.

        Args:
            path: Folder with ``config.json``, or with one ``.gguf`` file and no safetensors.
                End-of-text tokens of ``generation_config.json``, if present, take precedence over those of
                ``config.json``.

        Raises:
            NotFoundError: There is no ``config.json``.
            InvalidArgumentError: A file is not JSON, or the model is not supported; the message names the field.
        """
        if (gguf := find_gguf(path)) is not None:
            return cls.from_json(config_of_gguf(gguf))
        config = _read_object(path / "config.json")
        generation = path / "generation_config.json"
        return cls.from_json(config, _read_object(generation) if generation.is_file() else {})

    @classmethod
    def from_json(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Self:
        """Convert a parsed ``config.json`` and, optionally, a parsed ``generation_config.json``.

        Raises:
            InvalidArgumentError: The model is not supported; the message names the field.
        """
        architecture = _architecture(config)
        values = _DEFAULTS[architecture] | {name: value for name, value in config.items() if value is not None}
        _refuse_unsupported(values)
        num_layers, num_heads = _count(values, "num_hidden_layers"), _count(values, "num_attention_heads")
        if num_layers > _MAX_LAYERS:
            raise _fault("num_hidden_layers", f"at most {_MAX_LAYERS}", num_layers)
        hidden_size = _count(values, "hidden_size")
        has_bias = architecture != _MISTRAL and bool(values.get("attention_bias", False))
        window, sliding_layers = _sliding(architecture, config, values, num_layers)
        vocab_size, ends = _count(values, "vocab_size"), (generation or {}).get("eos_token_id")
        eos = _token_ids("eos_token_id", values.get("eos_token_id") if ends is None else ends)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_count(values, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(values, "num_key_value_heads", num_heads),
            head_dim=_count(values, "head_dim", hidden_size // num_heads),
            rope=rope_of_config(values),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            max_position_embeddings=_count(values, "max_position_embeddings"),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            has_qk_norm=architecture == _QWEN3,
            has_qkv_bias=architecture == _QWEN2 or has_bias,
            has_output_bias=architecture != _QWEN2 and has_bias,
            sliding_window=window,
            sliding_layers=sliding_layers,
            eos_token_ids=tuple(token for token in eos if token < vocab_size),
            bos_token_id=next(iter(_token_ids("bos_token_id", values.get("bos_token_id"))), None),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch."),
        )


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


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _DEFAULTS:
        raise _fault("architectures", f"a list with one of {', '.join(_DEFAULTS)}", named)
    return str(named[0])


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise _fault("hidden_act", f"one of {', '.join(_ACTIVATIONS)}", activation)
    if values.get("mlp_bias"):
        raise _fault("mlp_bias", "false: feed-forward layers with a bias are not supported", True)


def _sliding(
    architecture: str, config: Mapping[str, Any], values: Mapping[str, Any], num_layers: int
) -> tuple[int, tuple[bool, ...]]:
    """The window and the layers that use it, by the rules of each architecture."""
    if architecture == _LLAMA:
        return 0, ()
    types = values.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}
    ):
        raise _fault("layer_types", f"'{_FULL}' or '{_SLIDING}' for each of {num_layers} layers", types)
    if architecture == _MISTRAL:
        # An explicit null switches the window off, a missing field means the default.
        window = _count(values, "sliding_window") if config.get("sliding_window", 0) is not None else 0
        if types is not None and set(types) != {_SLIDING if window else _FULL}:
            raise _fault("layer_types", "the same for all layers of this architecture", types)
        return window, ()
    window = _count(values, "sliding_window", 4096) if values.get("use_sliding_window", False) else 0
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise _fault("max_window_layers", "a whole number of layers", first)
        return window, tuple(index >= first for index in range(num_layers)) if window else ()
    if _SLIDING in types and not window:
        raise _fault("use_sliding_window", f"true where layer_types has '{_SLIDING}'", False)
    return window, tuple(kind == _SLIDING for kind in types) if window else ()


def _count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if type(value) is not int or value <= 0:
        raise _fault(name, "a whole number above 0", value)
    return value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise _fault(name, "a token id or a list of them", value)
    return tuple(ids)


def _fault(name: str, allowed: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"config.json: {name} must be {allowed}, got {got!r}")
