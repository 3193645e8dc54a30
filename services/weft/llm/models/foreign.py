"""Any other causal language model of transformers: its configuration. It imports transformers, and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.llm.models.fields import count, fault, stored_dtype, token_ids
from weft.llm.models.model_config import TransformerConfig


@dataclass(frozen=True)
class ForeignConfig(TransformerConfig):
    """A model whose layers are computed by transformers.

    Costs that are derived from it are those of a Llama of the same size.

    Attributes:
        fields: Its ``config.json``.
        kv_layers: Part of the KV cache of each layer; layers that share keys and values have one part.
    """

    class_name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    kv_layers: tuple[int, ...] = ()

    @property
    @override
    def name(self) -> str:
        return self.class_name

    @property
    @override
    def num_kv_layers(self) -> int:
        return max(self.kv_layers) + 1


def foreign_config(name: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ForeignConfig:
    """Convert a parsed ``config.json`` of the architecture ``name``, which Weft has no module for.

    Raises:
        UnsupportedError: transformers is not installed.
        InvalidArgumentError: transformers has no such model, or rejects the configuration.
    """
    try:
        import transformers  # noqa: PLC0415  # takes a second, and only these models need it
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"config.json: architecture '{name}' runs through transformers: pip install 'weft-mesh[llm]'"
        ) from error
    kind = config.get("model_type")
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in transformers.CONFIG_MAPPING or name not in causal.values():
        raise fault("architectures", "a causal language model that transformers has", [name])
    if config.get("quantization_config") is not None:
        raise fault("quantization_config", f"absent: '{name}' runs through transformers, in numbers only", "one")
    try:
        text = transformers.CONFIG_MAPPING[kind].from_dict(dict(config)).get_text_config(decoder=True)
        kv_layers, originals = _kv_layers(text), _originals(text)
        found = {each: value for each in _NUMBERS if (value := _largest(text, each)) is not None}
    except Exception as error:  # whatever its checks raise
        raise InvalidArgumentError(f"config.json: transformers rejects it: {str(error)[:300]}") from error
    heads, width, vocab_size = (count(found, each) for each in ("num_attention_heads", "hidden_size", "vocab_size"))
    ends = (generation or {}).get("eos_token_id")
    ends = token_ids("eos_token_id", getattr(text, "eos_token_id", None) if ends is None else ends)
    return ForeignConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=count(found, "intermediate_size", 4 * width),
        num_layers=count(found, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=count(found, "num_key_value_heads", heads),
        head_dim=count(found, "head_dim", width // heads),
        max_position_embeddings=min([count(found, "max_position_embeddings"), *originals]),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        eos_token_ids=tuple(token for token in ends if token < vocab_size),
        bos_token_id=next(iter(token_ids("bos_token_id", getattr(text, "bos_token_id", None))), None),
        dtype=stored_dtype(config),
        class_name=name,
        fields=dict(config),
        kv_layers=kv_layers,
    )


def _kv_layers(text: Any) -> tuple[int, ...]:
    """``ForeignConfig.kv_layers``: a layer that reuses has the part of the last layer of its type that has its own."""
    modes = getattr(text, "kv_sharing_modes", None) or [None] * getattr(text, "num_hidden_layers", 0)
    kinds = getattr(text, "layer_types", None) or [""] * len(modes)
    parts: list[int] = []
    latest: dict[str, int] = {}
    for mode, kind in zip(modes, kinds, strict=True):
        if mode != "reuse":
            latest[kind] = len({*parts})
        parts.append(latest[kind])
    return tuple(parts)


def _largest(text: Any, name: str) -> Any:
    """A field, the largest of all layers where they differ."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    values = [getattr(layer, name, None) for layer in layers]
    given = [each for value in values for each in (value if isinstance(value, list) else [value]) if each is not None]
    return max(given, default=None)


def _originals(text: Any) -> list[int]:
    """Lengths up to which LongRoPE turns all texts alike; beyond, the longest text of a step decides for the others."""
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping)]
    return [int(rope["original_max_position_embeddings"]) for rope in kinds if rope.get("rope_type") == "longrope"]


_NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
