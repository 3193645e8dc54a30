"""Whole engines on a GPU: captured steps, codes, few blocks, speculation and quantised weights change no token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.llm import test_gpt_oss
from tests.unit.llm.adapters import save_adapter
from tests.unit.llm.engine_fixture import Answer, finish, random_prompts, submit
from tests.unit.llm.quantized_folders import CONFIG, EXPERTS, FORMATS, config_json, save_folder
from tests.unit.llm.speculation.folders import trained_folders

from weft.backends.llm import loading
from weft.backends.llm.loading import load_engine
from weft.backends.llm.settings import Settings
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.engine import Engine
from weft.llm.models.registry import read_config
from weft.llm.speculation.speculator import FixedDepth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def write_models(folder: Path, kind: str = "nf4", config: TransformerConfig = CONFIG) -> tuple[Path, Path]:
    """Folders of a model of random codes, and of the float32 numbers that they stand for."""
    coded, plain = folder / "coded", folder / "plain"
    numbers = save_folder(coded, *FORMATS[kind], config=config)
    plain.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config_json(config, None)))
    return coded, plain


def served(folder: Path, device: str, **fields: Any) -> list[list[int]]:
    """Tokens of twelve prompts of 1 to 40 tokens, submitted together."""
    options: dict[str, Any] = {"device": device, "dtype": "float32", "block_size": 16, "num_blocks": 256}
    settings = Settings(EngineConfig(**options | fields), 1 << 20, has_weights=True)
    engine = load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)
    prompts = [[token % 64 for token in prompt] for prompt in random_prompts(12, 1, 40, 1)]
    names = ["", *(adapter.name for adapter in ([] if engine.lora is None else engine.lora.adapters))]
    answers = [
        Answer(prompt, max_tokens=16, lora_name=names[index % len(names)]) for index, prompt in enumerate(prompts)
    ]
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
    {"num_blocks": 24, "kv_offload_bytes": 1 << 22},
], ids=str)  # fmt: skip
def test_tokens_are_those_of_the_cpu(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Greedy tokens of float32 equal those of an engine on the CPU, whatever path the steps take."""
    _, plain = write_models(tmp_path)
    assert served(plain, "cpu") == served(plain, "cuda:0", **fields)


@pytest.mark.parametrize("fields", [{}, {"enable_cuda_graphs": False}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_draft_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fields: dict[str, Any]
) -> None:
    """A head that knows what its target says drafts behind captured steps and others; tokens are those of the CPU."""
    monkeypatch.setattr(loading, "AdaptiveDepth", lambda most, *costs: FixedDepth(most))
    monkeypatch.setattr(loading, "DraftBalance", lambda: None)
    folder, plain = trained_folders(tmp_path)

    def answered(folder: Path, **options: Any) -> tuple[list[list[int]], Engine]:
        config = EngineConfig(dtype="float32", num_blocks=64, max_num_seqs=4, block_size=16, **options)
        settings = Settings(config, 1 << 20, has_weights=True)
        engine = load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)
        answers = [
            Answer([start, start + 1], max_tokens=40, temperature=0.5 * (start % 2), seed=1) for start in range(6)
        ]
        submit(engine, answers)
        finish(engine, answers)
        return [answer.text for answer in answers], engine

    expected, _ = answered(plain)
    speculation = {"speculation": method} | ({"draft_model": "eagle3"} if method == "eagle3" else {})
    found, engine = answered(folder, device="cuda:0", **speculation, **fields)
    assert found == expected
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 0.5 * engine.speculator.num_drafts > 20


@pytest.mark.parametrize("fields", [
    {},
    {"enable_cuda_graphs": False},
    {"deterministic": True},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    {"speculation": "ngram"},
], ids=str)  # fmt: skip
def test_adapters_give_the_tokens_of_the_cpu(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Three adapters and none in one batch, through captured steps and others."""
    _, plain = write_models(tmp_path)
    for seed in range(3):
        save_adapter(plain / "adapters" / str(seed), read_config(plain), seed)
    given = {"lora_adapters": ",".join(f"{seed}=adapters/{seed}" for seed in range(3)), "max_loras": 4}
    on_cpu = served(plain, "cpu", **given)
    assert on_cpu != served(plain, "cpu")
    assert on_cpu == served(plain, "cuda:0", **given, **fields)


@pytest.mark.parametrize(
    "fields", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_codes_are_those_without_graphs(tmp_path: Path, fields: dict[str, Any]) -> None:
    """8-bit caches and quantised weights: captured steps and steps launched one by one give the same tokens."""
    _, plain = write_models(tmp_path)
    eager = served(plain, "cuda:0", enable_cuda_graphs=False, deterministic=True, **fields)
    assert eager == served(plain, "cuda:0", deterministic=True, **fields)


@pytest.mark.parametrize("kind", ["gptq act-order", "awq", "nf4", "bitsandbytes 8 bits", "compressed int8"])
def test_a_quantised_folder_answers_as_its_numbers(tmp_path: Path, kind: str) -> None:
    """Greedy tokens are those of a float32 folder of the same numbers on the CPU: activations stay numbers on a GPU."""
    coded, plain = write_models(tmp_path, kind)
    assert served(plain, "cpu") == served(coded, "cuda:0")


@pytest.mark.parametrize("fields", [{}, {"deterministic": True}, {"num_blocks": 24}], ids=str)
def test_gpt_oss_in_mxfp4(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Sinks, windows, experts of codes and the clamped activation: tokens are those of the numbers on the CPU."""
    coded, plain = test_gpt_oss.write_models(tmp_path)
    assert served(plain, "cpu") == served(coded, "cuda:0", **fields)


@pytest.mark.parametrize("fields", [
    {},
    {"enable_cuda_graphs": False},
    {"deterministic": True},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    {"speculation": "ngram"},
], ids=str)  # fmt: skip
def test_experts(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A mixture of experts gives the tokens of the CPU, in steps captured and launched one by one."""
    _, plain = write_models(tmp_path, config=EXPERTS)
    assert served(plain, "cpu") == served(plain, "cuda:0", **fields)


@pytest.mark.parametrize("kind", ["awq", "gptq act-order", "nf4", "compressed int8"])
def test_experts_of_codes(tmp_path: Path, kind: str) -> None:
    """Experts of codes give the tokens of their numbers, also where each has an order of inputs of its own."""
    coded, plain = write_models(tmp_path, kind, EXPERTS)
    assert served(plain, "cpu") == served(coded, "cuda:0")
