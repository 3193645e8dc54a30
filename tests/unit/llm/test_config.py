"""Configurations: what a ``config.json`` means, what an engine's settings may be, and what the errors say."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.models.llama import Llama
from weft.llm.models.registry import config_from_json, read_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def _config(architecture: str = "Llama", **changes: Any) -> TransformerConfig:
    return config_from_json({**_LLAMA, "architectures": [f"{architecture}ForCausalLM"], **changes})


def test_llama() -> None:
    """Every field of a plain ``config.json`` arrives, and what it does not say has the default of the architecture."""
    expected = Llama(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    )
    assert expected == _config()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3_ROPE}},
        {"rope_scaling": {"rope_type": "llama3", **_LLAMA3_ROPE}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **_LLAMA3_ROPE}, "rope_theta": 5e5, "rope_parameters": None},
    ],
)
def test_old_and_new_spelling_of_rope(fields: dict[str, Any]) -> None:
    """``rope_parameters``, and ``rope_scaling`` beside ``rope_theta``, mean the same."""
    assert {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3_ROPE} == _config(**fields).rope


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "llama3", **_LLAMA3_ROPE}, 512),
    ],
)
def test_longest_text(rope: dict[str, Any], longest: int) -> None:
    """Linear and yarn stretch the context; dynamic does not, because stored keys would have to change."""
    assert longest == _config(rope_parameters=rope).max_context_len


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("Llama", {"sliding_window": 8}, (0, 0, 0)),
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (0, 0, 0)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Qwen2", {"sliding_window": 8}, (0, 0, 0)),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True}, (0, 0, 0)),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8)),
        (
            "Qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
)
def test_which_layers_slide(architecture: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    """Each architecture has its own rule for which layers see the last tokens only."""
    assert windows == _config(architecture, **fields).windows


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Llama", {}, (False, False, False, 16)),
        ("Llama", {"attention_bias": True}, (False, True, True, 16)),
        ("Qwen2", {}, (False, True, False, 16)),
        ("Qwen3", {}, (True, False, False, 128)),
        ("Mistral", {"head_dim": 32}, (False, False, False, 32)),
    ],
)
def test_what_differs(architecture: str, fields: dict[str, Any], expected: tuple[bool, bool, bool, int]) -> None:
    """Norms of heads, biases and the width of a head follow from the architecture."""
    config = _config(architecture, **fields)
    assert expected == (config.has_qk_norm, config.has_qkv_bias, config.has_output_bias, config.head_dim)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures must be a list with one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures must be"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"vocab_size": None}, "vocab_size must be a whole number above 0, got None"),
        ({"vocab_size": True}, "vocab_size must be a whole number above 0, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0, got 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a whole number above 0, got '4'"),
        ({"num_key_value_heads": 3}, "num_kv_heads must be a divisor of num_heads = 4, got 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number above 0 and below 1, got 'tiny'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype must be one of float32, float16, bfloat16, got 'float8_e4m3fn'"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id must be a token id or a list of them"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type must be one of default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number above 0, got None"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor must be a number above 0, got '4'"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"rope_theta": -1}, "rope_theta must be a number above 0, got -1"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, got inf"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters must be one set of values"),
        (
            {"rope_scaling": {**_LLAMA3_ROPE, "type": "llama3", "low_freq_factor": 4.0}},
            "low_freq_factor must be below high_freq_factor",
        ),
    ],
)
def test_unsupported_models(fields: dict[str, Any], message: str) -> None:
    """What cannot be run as the file says is refused, by the name of the field with the value got."""
    with pytest.raises(InvalidArgumentError) as caught:
        _config(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "fields", "name"),
    [
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers"),
        ("Mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("Mistral", {"sliding_window": -1}, "sliding_window"),
    ],
)
def test_unsupported_windows(architecture: str, fields: dict[str, Any], name: str) -> None:
    """Layer types and windows that say something else than the architecture does are refused."""
    with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
        _config(architecture, **fields)


def test_folder(tmp_path: Path) -> None:
    """End-of-text tokens of ``generation_config.json`` go before those of ``config.json``."""
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA))
    assert (2,) == read_config(tmp_path).eos_token_ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert (7, 9) == read_config(tmp_path).eos_token_ids
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert (2,) == read_config(tmp_path).eos_token_ids


def test_folder_that_is_none(tmp_path: Path) -> None:
    """A folder without ``config.json``, and files that are not JSON objects, are said to be so."""
    with pytest.raises(NotFoundError, match=r"no config\.json in"):
        read_config(tmp_path)
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidArgumentError, match=r"config\.json (is not JSON|must hold a JSON object)"):
            read_config(tmp_path)


def test_engine_defaults() -> None:
    """A step has 128 tokens on a CPU and 2048 on a GPU, and never fewer than there are sequences."""
    assert (128, 128) == (EngineConfig().max_num_batched_tokens, EngineConfig().long_prefill_token_threshold)
    assert 2048 == EngineConfig(device="cuda:1").max_num_batched_tokens
    assert 512 == EngineConfig(max_num_seqs=256).max_num_batched_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 17}, "block_size must be 0 or one of 4, 8, 16, 32, 64, 128, 256, got 17"),
        ({"block_size": True}, "block_size must be a whole number, got True"),
        ({"num_blocks": -1}, "num_blocks must be from 0 to"),
        ({"num_blocks": 1}, "num_blocks must be 0 or at least 2"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes must be from 0 to"),
        ({"max_num_seqs": 0}, "max_num_seqs must be from 1 to"),
        ({"max_num_seqs": 64.0}, "max_num_seqs must be a whole number, got 64.0"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens must be at least max_num_seqs = 64"),
        ({"max_model_len": -1}, "max_model_len must be from 0 to"),
        ({"max_model_len": 1}, "max_model_len must be 0 or at least 2, a prompt's token and a new one, got 1"),
        ({"speculation": "medusa"}, "must be the folder of the heads that weft train-heads writes, with speculation ="),
        ({"speculation": "guess"}, "speculation must be one of none, ngram, draft, medusa, lookahead, got 'guess'"),
        ({"speculation": "draft"}, "must be the folder of the draft model, with speculation = draft"),
        ({"draft_model": "x"}, "draft_model must be empty with speculation = none, got 'x'"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens must be from 1 to 16, got 17"),
        ({"speculation": "ngram", "draft_model": "x"}, "draft_model must be empty with speculation = ngram, got 'x'"),
        (
            {"speculation": "ngram", "max_num_seqs": 1, "max_num_batched_tokens": 1},
            "max_num_batched_tokens must be at least 2 with speculation, a token and a draft, got 1",
        ),
        (
            {"async_scheduling": "true", "kv_offload_bytes": 4096},
            "async_scheduling must be auto or false with speculation or kv_offload_bytes, whose plans depend on the",
        ),
        ({"watermark": 0.6}, "watermark must be from 0.0 to 0.5, got 0.6"),
        ({"watermark": float("nan")}, "watermark must be a finite number, got nan"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, got 1"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, int8, fp8, got 'int4'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto or int8 on a CPU"),
        ({"quantization": "int3"}, "quantization must be one of none, int8, int4, got 'int3'"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"num_threads": 0}, "num_threads must be from 1 to"),
        ({"seed": 2**63}, "seed must be from -1 to"),
    ],
)
def test_engine_bounds(fields: dict[str, Any], message: str) -> None:
    """A field out of its range is refused by name, with the range and the value got."""
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(**fields)
    assert message in str(caught.value)


def test_what_cannot_be_planned_ahead() -> None:
    """A model of sliding windows refuses the explicit wish, not the default; one layer without a window grants it."""
    model = _config("Mistral", sliding_window=8)
    EngineConfig(device="cuda").resolved(model)
    with pytest.raises(InvalidArgumentError, match="async_scheduling must be auto or false for a model whose"):
        EngineConfig(async_scheduling="true").resolved(model)
    EngineConfig(async_scheduling="true").resolved(_config())


def test_engine_parameters() -> None:
    """Parameters of a ``config.pbtxt`` are read by the types of their fields."""
    parameters = {"deterministic": "TRUE", "block_size": " 8", "watermark": "0", "dtype": "float16", "seed": "5"}
    expected = EngineConfig(deterministic=True, block_size=8, watermark=0.0, dtype="float16", seed=5)
    assert expected == EngineConfig.from_parameters(parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_num_sequences": "4"}, "unknown parameter 'max_num_sequences'; did you mean 'max_num_seqs'?"),
        ({"seed": "5.0"}, "seed must be a whole number, got '5.0'"),
        ({"seed": ""}, "seed must be a whole number, got ''"),
        ({"watermark": "inf"}, "watermark must be a finite number, got inf"),
        ({"deterministic": "yes"}, "deterministic must be true or false, got 'yes'"),
    ],
)
def test_wrong_engine_parameters(parameters: dict[str, str], message: str) -> None:
    """A parameter that no field has, or whose text is not of the field's type, is refused."""
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig.from_parameters(parameters)
    assert message in str(caught.value)


def test_resolved() -> None:
    """Type, longest text and number of blocks come from the model where they are not set, and stay where they are."""
    model = _config()
    # A token has 2 x 3 layers x 2 heads x 16 numbers of 2 bytes.
    assert 384 == model.kv_bytes_per_token("bfloat16")
    # With codes: 2 x 3 layers x 2 heads x (16 bytes and a scale of 4).
    assert 240 == model.kv_bytes_per_token("int8") == model.kv_bytes_per_token("fp8")
    assert 16 == EngineConfig(kv_cache_bytes=16 * 8 * 240 + 5, kv_cache_dtype="int8").resolved(model).num_blocks
    config = EngineConfig(kv_cache_bytes=10 * 8 * 384 + 5).resolved(model)
    assert ("bfloat16", 512, 10) == (config.dtype, config.max_model_len, config.num_blocks)
    config = EngineConfig(dtype="float32", max_model_len=100, num_blocks=7)
    assert config == config.resolved(model)


def test_the_cache_of_a_gpu_is_what_its_memory_leaves() -> None:
    """Where neither size is set: 90 % of what is free once the weights are there; a CPU has 256 MiB.

    Blocks have 16 tokens on a GPU and 8 on a CPU.
    """
    model, block_bytes = _config(), 16 * 384
    assert [8, 16] == [EngineConfig(device=device).block_size for device in ("cpu", "cuda:1")]
    assert 256 * 2**20 // (block_bytes // 2) == EngineConfig().resolved(model).num_blocks
    config = EngineConfig(device="cuda:1").resolved(model)
    assert 0 == config.num_blocks
    assert 9 == config.with_cache(model, lambda: 10 * block_bytes).num_blocks
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_bytes must be at least {2 * block_bytes}, .* got 900; "):
        config.with_cache(model, lambda: 1000)
    for fields in ({"kv_cache_bytes": 5 * block_bytes}, {"num_blocks": 5}):
        config = EngineConfig(device="cuda", **fields).resolved(model)  # type: ignore[arg-type]
        assert 5 == config.with_cache(model, lambda: pytest.fail("not asked for")).num_blocks


def test_what_a_model_cannot_do() -> None:
    """A context longer than the model's, and a cache of less than two blocks, are refused with the bound."""
    with pytest.raises(InvalidArgumentError, match=r"max_model_len must be at most 512, .* got 513"):
        EngineConfig(max_model_len=513).resolved(_config())
    with pytest.raises(InvalidArgumentError, match=f"kv_cache_bytes must be at least {2 * 8 * 384}, "):
        EngineConfig(kv_cache_bytes=2 * 8 * 384 - 1).resolved(_config())


def test_direct_construction_is_checked() -> None:
    """A configuration made without a file is held to the same rules."""
    model = _config()
    for changes in ({"num_heads": 3}, {"sliding_layers": (True,)}, {"sliding_window": -1}, {"dtype": "int8"}):
        with pytest.raises(InvalidArgumentError, match="must be"):
            replace(model, **changes)


def test_no_tensor_library() -> None:
    """The configurations need no torch: the scheduler, which reads them, runs without."""
    code = "import sys, weft.llm.config; sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


@pytest.mark.parametrize(("quantization", "num_bits"), [("none", 0), ("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_weights_are_rounded_on_any_device(quantization: str, num_bits: int, device: str) -> None:
    """``quantization`` means so many bits on CPUs and on GPUs."""
    assert num_bits == EngineConfig(quantization=quantization, device=device).num_bits
