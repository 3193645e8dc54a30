"""Whole engines on a GPU: captured steps, codes, few blocks, speculation and quantised weights change no token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.llm.engine_fixture import Answer, finish, random_prompts
from tests.unit.llm.quantized_folders import FORMATS, save_folder

from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.llm.config import EngineConfig
from weft.llm.models.registry import read_config
from weft.llm.models.weights import random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_random(folder: Path) -> None:
    """A Llama of random float32 weights, as transformers writes it."""
    config_json = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"} | _SIZES
    (folder / "config.json").write_text(json.dumps(config_json))
    config = read_config(folder)
    weights = random_weights(config, 5, dtype=torch.float32, device="cpu")
    tensors = {}
    for name, parts in config.weight_parts().items():
        pieces = weights[name].split([part.shape[0] for part in parts])
        tensors |= {part.name: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    save_file(tensors, folder / "model.safetensors")


def served(folder: Path, device: str, **fields: Any) -> list[list[int]]:
    """Tokens of twelve prompts of 1 to 40 tokens, submitted together."""
    config = EngineConfig(**{"device": device, "dtype": "float32", "block_size": 16, "num_blocks": 256} | fields)
    settings = Settings(config, 1 << 20, has_weights=True)
    engine = load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)
    prompts = [[token % 64 for token in prompt] for prompt in random_prompts(12, 1, 40, 1)]
    answers = [Answer(prompt, max_tokens=16) for prompt in prompts]
    for answer in answers:
        engine.submit(answer.request)
    finish(engine, answers)
    assert [] == [answer.error for answer in answers if answer.error is not None]
    return [answer.text for answer in answers]


@pytest.mark.parametrize("fields", [
    {},
    {"enable_cuda_graphs": False},
    {"async_scheduling": "false"},
    {"deterministic": True},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    {"num_blocks": 24},
    {"speculation": "ngram"},
    {"speculation": "lookahead"},
    {"num_blocks": 24, "kv_offload_bytes": 1 << 22},
], ids=str)  # fmt: skip
def test_tokens_are_those_of_the_cpu(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Greedy tokens of float32 equal those of an engine on the CPU, whatever path the steps take."""
    write_random(tmp_path)
    assert served(tmp_path, "cpu") == served(tmp_path, "cuda:0", **fields)


@pytest.mark.parametrize(
    "fields", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_codes_are_those_without_graphs(tmp_path: Path, fields: dict[str, Any]) -> None:
    """8-bit caches and quantised weights: captured steps and steps launched one by one give the same tokens."""
    write_random(tmp_path)
    eager = served(tmp_path, "cuda:0", enable_cuda_graphs=False, deterministic=True, **fields)
    assert eager == served(tmp_path, "cuda:0", deterministic=True, **fields)


@pytest.mark.parametrize("kind", ["gptq act-order", "awq", "nf4", "bitsandbytes 8 bits", "compressed int8"])
def test_quantised_folders_answer_as_on_a_cpu(tmp_path: Path, kind: str) -> None:
    """Float32 products with codes give the tokens of the CPU's."""
    save_folder(tmp_path, *FORMATS[kind])
    assert served(tmp_path, "cpu", max_num_seqs=4) == served(tmp_path, "cuda:0", max_num_seqs=4)
