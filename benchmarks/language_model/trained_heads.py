"""EAGLE-3 and MTP heads that are trained in seconds, for what they are good for: to see drafts accepted."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.language_model.plain_heads import PlainEagle3, PlainHead, PlainMtp, Sizes, llama_states, train
from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.heads import HeadConfig
from weft.llm.models.mimo import MimoHead
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights
from weft.llm.weights.parts import EMBEDDING, LM_HEAD

METHODS = ("eagle3", "mtp")
#: Tokens of a text that see one another.
_PIECE_LEN = 512


def tensors_of(config: TransformerConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint from weights by the names of ``config.weight_parts``."""
    tensors = {}
    for name, parts in config.weight_parts().items():
        pieces = weights[name].split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    return tensors


def _sizes(config: TransformerConfig) -> Sizes:
    theta = config.rope["rope_theta"]
    return Sizes(config.num_heads, config.num_kv_heads, config.head_dim, theta, config.rms_norm_eps)


def plain_head(
    method: str, config: HeadConfig, weights: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> PlainHead:
    """The head of ``weights``, by the names of its configuration; ``target``: weights of its target."""
    tensors = tensors_of(config, weights)
    if method == "mtp":
        return PlainMtp(tensors, _sizes(config), target[EMBEDDING], target.get(LM_HEAD, target[EMBEDDING]))
    return PlainEagle3(tensors, _sizes(config), target[EMBEDDING])


def eagle3_json(target: TransformerConfig, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` of an EAGLE-3 head of the width of its target."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [1, target.num_layers // 2 + 1, target.num_layers],
        **changes,
    }


def trained_head(
    method: str,
    target: TransformerConfig,
    target_weights: Mapping[str, Tensor],
    text: Tensor,
    num_steps: int,
    *,
    described: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head that learned what its target says behind the tokens of a text; its weights by the names of its parts.

    ``described``: of an EAGLE-3 head, as ``eagle3_json``; ``options``: of ``train``.
    """
    described = described or eagle3_json(target)
    config = MimoHead.of(target) if method == "mtp" else eagle3_config(described, [LM_HEAD], target)
    weights = random_weights(config, 4, dtype=torch.float32)
    plain = plain_head(method, config, weights, target_weights)
    tensors, layers = tensors_of(target, target_weights), target.num_layers
    pieces = [llama_states(each, tensors, _sizes(target), layers) for each in text.split(_PIECE_LEN)]
    states = [torch.cat(layer) for layer in zip(*pieces, strict=True)]
    lm_head = target_weights.get(LM_HEAD, target_weights[EMBEDDING])

    def labels(first: int, end: int) -> Tensor:
        return (states[-1][first - 1 : end - 1] @ lm_head.T).softmax(-1)

    train(plain, text, [states[layer] for layer in config.taps or (-1,)], labels, num_steps, **options)
    parts = config.weight_parts().items()
    return config, {name: torch.cat([plain.weights[part.name] for part in each]) for name, each in parts}
