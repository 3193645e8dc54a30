"""Hashes of blocks: equal in all processes that have the mesh's key and compute the same, and in no others."""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.llm.adapters import save_adapter

from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.llm.config import EngineConfig
from weft.llm.models.registry import read_config
from weft.llm.request import EngineRequest, SamplingParams

_ROOT = Path(__file__).parents[4]
_TOKENS = array("i", range(40))
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def write_folder(folder: Path, seed: int = 0, **fields: object) -> Path:
    """A small Llama and two adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG | fields))
    config = read_config(folder)
    generator = torch.Generator().manual_seed(seed)
    parts = [part for parts in config.weight_parts().values() for part in parts]
    save_file({part.name: torch.randn(part.shape, generator=generator) for part in parts}, folder / "model.safetensors")
    for name, own in (("a", 1), ("b", 2)):
        save_adapter(folder / name, config, own)
    return folder


def hashes(
    folder: Path, mesh_key: str = "of this mesh", adapter: str = "", adapters: str = "x=a,y=b", **options: Any
) -> list[str]:
    """Of the blocks of 40 tokens, by an engine that has just loaded the model."""
    fields: dict[str, Any] = {"num_blocks": 8, "block_size": 8, "dtype": "float32", "lora_adapters": adapters} | options
    settings = Settings(EngineConfig(**fields), 1 << 20, has_weights=True, mesh_key=mesh_key)
    engine = load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)
    try:
        request = EngineRequest(np.zeros(1, np.int32), SamplingParams(lora_name=adapter), lambda delta: None)
        if adapter:
            engine.lora.acquire(request)  # type: ignore[union-attr]  # it has adapters
        found = engine.pool.hasher.prompt(request.cache_key, _TOKENS, lambda: False)
    finally:
        engine.stop(0.0)
    return [one.hex() for one in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m")


def test_processes_with_the_key_have_the_same_hashes(folder: Path) -> None:
    """Of the model, and of an adapter, whatever its name is and whichever others there are."""
    script = (
        "from pathlib import Path; from tests.unit.backends.llm.test_block_hashes import hashes; "
        f"print(hashes(Path({str(folder)!r})), hashes(Path({str(folder)!r}), adapter='q', adapters='p=a,q=b'), sep='|')"
    )
    command = [sys.executable, "-c", script]
    other = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    assert f"{hashes(folder)}|{hashes(folder, adapter='y')}" == other
    assert len(hashes(folder)) == 5
    assert not set(hashes(folder, adapter="x")) & set(hashes(folder, adapter="y"))


def _change_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5000] ^= 1
    (folder / "model.safetensors").write_bytes(data)


_DIFFERENT: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "key": (lambda folder: None, {"mesh_key": "of another mesh"}),
    "no key": (lambda folder: None, {"mesh_key": ""}),
    "a byte of the weights": (_change_a_byte, {}),
    "other weights": (partial(write_folder, seed=1), {}),
    "config.json": (partial(write_folder, rope_theta=20000.0), {}),
    "dtype": (lambda folder: None, {"dtype": "bfloat16"}),
    "kv_cache_dtype": (lambda folder: None, {"kv_cache_dtype": "int8"}),
    "quantization": (lambda folder: None, {"quantization": "int8", "adapters": ""}),
    "deterministic": (lambda folder: None, {"deterministic": True}),
    "adapter": (lambda folder: None, {"adapter": "x"}),
}


@pytest.mark.parametrize("name", _DIFFERENT)
def test_what_changes_keys_and_values_changes_all_hashes(folder: Path, name: str) -> None:
    """No block of one is taken for a block of the other."""
    change, options = _DIFFERENT[name]
    before = hashes(folder)
    change(folder)
    assert not set(before) & set(hashes(folder, **options))
    assert (name == "no key") == (hashes(folder, **options) != hashes(folder, **options)), "drawn anew"
