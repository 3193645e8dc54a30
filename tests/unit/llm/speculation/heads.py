"""Heads of tiny targets: random ones, and those that know a permutation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.language_model import trained_heads
from benchmarks.language_model.trained_heads import tensors_of
from safetensors.torch import save_file
from torch import Tensor

from weft.llm.models.eagle3 import eagle3_config
from weft.llm.models.heads import HeadConfig
from weft.llm.models.mimo import MimoHead
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.registry import read_config
from weft.llm.models.weights import random_weights
from weft.llm.speculation.heads import DraftHead
from weft.llm.weights.parts import LM_HEAD

TAPS = (0, 1, 2)


def eagle3_json(target: TransformerConfig, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` of an EAGLE-3 head with other sizes than its target's, and fewer tokens."""
    own: dict[str, Any] = {
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "draft_vocab_size": 2 * target.vocab_size // 3,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }
    return trained_heads.eagle3_json(target, **own | changes)


def head_config(method: str, target: TransformerConfig) -> HeadConfig:
    """The configuration of a head of the method ``eagle3`` or ``mtp``."""
    return MimoHead.of(target) if method == "mtp" else eagle3_config(eagle3_json(target), [LM_HEAD], target)


def trained_head(
    method: str, target: TransformerConfig, target_weights: Mapping[str, Tensor], successors: Tensor
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head for the permutation model of these weights, and its weights by the names of its configuration."""
    tokens = [0]
    for _ in range(399):
        tokens.append(int(successors[tokens[-1]]))
    described = eagle3_json(target, draft_vocab_size=target.vocab_size)
    options: dict[str, Any] = {"num_windows": 2, "window": 48, "learning_rate": 1e-2, "described": described}
    return trained_heads.trained_head(method, target, target_weights, torch.tensor(tokens), 120, **options)


def random_target_ids(config: HeadConfig) -> Tensor | None:
    """Which tokens a head drafts, in their order."""
    if not config.draft_vocab_size:
        return None
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values


def random_head(method: str, target: TransformerModel, seed: int = 4) -> DraftHead:
    """A head without sense."""
    config = head_config(method, target.config)
    weights = dict(random_weights(config, seed, dtype=target.dtype))
    return DraftHead(config, weights, target, target_ids=random_target_ids(config))


def eagle3_folder(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder of a random EAGLE-3 head; ``changes`` are fields of its ``config.json``."""
    config = read_config(target)
    folder.mkdir()
    described = eagle3_json(config) | changes
    (folder / "config.json").write_text(json.dumps(described))
    head = eagle3_config(eagle3_json(config), [LM_HEAD], config)
    tensors = tensors_of(head, dict(random_weights(head, 1)))
    ids = random_target_ids(head)
    assert ids is not None
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors")
    return folder
