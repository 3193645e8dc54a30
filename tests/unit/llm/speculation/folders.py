"""Folders of tiny models, as transformers writes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from benchmarks.language_model.trained_heads import tensors_of
from safetensors.torch import load_file, save_file
from tests.unit.llm.permutation_model import permutation, permutation_weights
from tests.unit.llm.speculation.heads import eagle3_json, trained_head

from weft.llm.config import HEADS
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
    save_file(tensors_of(config, weights), folder / "model.safetensors")
    return folder


def trained_folders(path: Path) -> tuple[Path, Path]:
    """A MiMo with its MTP layer and an EAGLE-3 head in ``eagle3``, and the same without; each knows what it says."""
    own = write_model(path / "plain", architectures=["MiMoForCausalLM"], num_hidden_layers=2)
    config = read_config(own)
    weights = permutation_weights(config, seed=1, epsilon=0.0)
    successors = torch.from_numpy(permutation(config.vocab_size, 1))
    folder = Path(shutil.copytree(own, path / "model"))
    for name in HEADS:
        head, trained = trained_head(name, config, weights, successors)
        tensors = tensors_of(head, trained)
        if name == "mtp":
            save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
        else:
            (folder / name).mkdir()
            described = eagle3_json(config, draft_vocab_size=config.vocab_size)
            (folder / name / "config.json").write_text(json.dumps(described))
            save_file(tensors, folder / name / "model.safetensors")
    return folder, own
