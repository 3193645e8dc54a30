"""Heads of tiny targets: random ones for the engine, and the same in plain torch."""

from typing import Any

import torch
from benchmarks.language_model.plain_heads import PlainEagle3, PlainHead, PlainMtp, Sizes, llama_states, train
from torch import Tensor

from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.heads import HeadConfig
from weft.llm.models.mimo import MimoHead
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights
from weft.llm.speculation.heads import DraftHead
from weft.llm.weights.parts import EMBEDDING, LM_HEAD

TAPS = (0, 1, 2)


def eagle3_json(target: TransformerConfig, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` of an EAGLE-3 head, with other numbers of heads than the target's."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": 2 * target.vocab_size // 3,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        **changes,
    }


def head_config(name: str, target: TransformerConfig) -> HeadConfig:
    """The configuration of a head of the method ``eagle3`` or ``mtp``."""
    return MimoHead.of(target) if name == "mtp" else eagle3_config(eagle3_json(target), [LM_HEAD], target)


def tensors_of(config: TransformerConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint from weights by the names of ``config.weight_parts``."""
    tensors = {}
    for name, parts in config.weight_parts().items():
        pieces = weights[name].split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    return tensors


def trained_head(
    name: str, target: TransformerConfig, target_weights: dict[str, Tensor], successors: Tensor, num_steps: int = 120
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head for the permutation model of these weights, and its weights by the names of its configuration."""
    described = eagle3_json(target, draft_vocab_size=target.vocab_size)
    config = MimoHead.of(target) if name == "mtp" else eagle3_config(described, [LM_HEAD], target)
    weights = dict(random_weights(config, 4, dtype=torch.float32))
    plain = plain_head(name, config, weights, target_weights)
    tokens = [0]
    for _ in range(399):
        tokens.append(int(successors[tokens[-1]]))
    text = torch.tensor(tokens)
    sizes = Sizes(target.num_heads, target.num_kv_heads, target.head_dim)
    states = llama_states(text, tensors_of(target, target_weights), sizes, target.num_layers)
    fed = [states[layer] for layer in (config.taps or (-1,))]
    train(plain, text, fed, num_steps, num_windows=2, window=48, learning_rate=1e-2)
    parts = config.weight_parts().items()
    return config, {name: torch.cat([plain.weights[part.name] for part in each]) for name, each in parts}


def random_target_ids(config: HeadConfig) -> Tensor | None:
    """Which tokens a head drafts, in their order."""
    if not config.draft_vocab_size:
        return None
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values


def random_head(name: str, target: TransformerModel, seed: int = 4) -> DraftHead:
    """A head without sense."""
    config = head_config(name, target.config)
    weights = dict(random_weights(config, seed, dtype=target.dtype))
    return DraftHead(config, weights, target, target_ids=random_target_ids(config))


def plain_head(name: str, config: HeadConfig, weights: dict[str, Tensor], target: dict[str, Tensor]) -> PlainHead:
    """The head of ``weights``, by the names of its configuration; ``target``: weights of its target."""
    sizes = Sizes(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rope["rope_theta"], config.rms_norm_eps
    )
    tensors = tensors_of(config, weights)
    if name == "mtp":
        return PlainMtp(tensors, sizes, target[EMBEDDING], target[LM_HEAD])
    return PlainEagle3(tensors, sizes, target[EMBEDDING])
