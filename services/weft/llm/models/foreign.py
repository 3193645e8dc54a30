"""Any other causal language model of transformers: its configuration. It imports transformers, and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.llm.models.fields import count, fault, token_ids
from weft.llm.models.model_config import TransformerConfig


@dataclass(frozen=True)
class ForeignConfig(TransformerConfig):
    """A model whose layers are computed by transformers.

    Costs that are derived from it are those of a Llama of the same size.

    Attributes:
        class_name: Its class in transformers.
        fields: Its ``config.json``.
    """

    class_name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    @override
    def name(self) -> str:
        return self.class_name


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
    except Exception as error:  # whatever its checks raise
        raise InvalidArgumentError(f"config.json: transformers rejects it: {str(error)[:300]}") from error
    found = {each: value for each in _NUMBERS if (value := getattr(text, each, None)) is not None}
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
        max_position_embeddings=min([count(found, "max_position_embeddings"), *_originals(text)]),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        eos_token_ids=tuple(token for token in ends if token < vocab_size),
        bos_token_id=next(iter(token_ids("bos_token_id", getattr(text, "bos_token_id", None))), None),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        class_name=name,
        fields=dict(config),
    )


def _originals(text: Any) -> list[int]:
    """Lengths up to which LongRoPE turns all texts alike; beyond, the longest text of a step decides for the others."""
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping)]
    return [int(rope["original_max_position_embeddings"]) for rope in kinds if rope.get("rope_type") == "longrope"]


_NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
