"""Adapters with random weights, written as PEFT writes them, and the models that they are merged into."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.llm.models.model_config import TransformerConfig

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": "all-linear"}


def modules_of(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the linear layers of attention and MLP, by the names of their modules in the checkpoint."""
    return {
        part.name.removesuffix(".weight"): part.shape for parts in config.adapted_parts().values() for part in parts
    }


def save_adapter(
    folder: Path, config: TransformerConfig, seed: int, targets: tuple[str, ...] = (), **changes: Any
) -> dict[str, torch.Tensor]:
    """Write an adapter of the modules that end so; empty: of all. Returns what it adds to each weight, by module."""
    described = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for module, (num_outputs, num_inputs) in modules_of(config).items():
        if targets and not module.endswith(targets):
            continue
        leaf = module.rpartition(".")[2]
        rank = described.get("rank_pattern", {}).get(leaf, described["r"])
        alpha = described.get("alpha_pattern", {}).get(leaf, described["lora_alpha"])
        down = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        up = torch.randn(num_outputs, rank, generator=generator) / rank**0.5 / 2
        name = f"base_model.model.{module}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        added[module] = alpha / (rank**0.5 if described.get("use_rslora") else rank) * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return added


def merged(
    config: TransformerConfig, weights: dict[str, torch.Tensor], added: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights, with what an adapter adds to them."""
    result = {name: weight.clone() for name, weight in weights.items()}
    for name, parts in config.weight_parts().items():
        first = 0
        for part in parts:
            own = added.get(part.name.removesuffix(".weight")) if part.name.endswith(".weight") else None
            if own is not None:
                result[name][first : first + part.shape[0]] += own
            first += part.shape[0]
    return result
