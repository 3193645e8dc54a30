"""Folders of tiny models, as transformers writes them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tests.unit.llm.permutation_model import permutation_weights

from weft.llm.models.registry import read_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def write_model(folder: Path, *, seed: int = 1, corrupted: float = 0.0, **changes: Any) -> Path:
    """A permutation model without attention; ``changes`` are fields of its ``config.json``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    config = read_config(folder)
    weights = permutation_weights(config, seed=seed, epsilon=0.0, corrupted=corrupted)
    tensors = {}
    for name, parts in config.weight_parts().items():
        pieces = weights[name].split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    save_file(tensors, folder / "model.safetensors")
    return folder
