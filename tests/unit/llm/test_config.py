"""Configurations and sampling parameters: what they mean, what is refused, and what the errors say."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import says, table

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.config import EngineConfig, TransformerConfig, kv_window
from weft.llm.models.registry import config_from_json, read_config
from weft.llm.request import SamplingParams
from weft.llm.runner import retain_freed_memory

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


def _config(**changes: Any) -> TransformerConfig:
    return config_from_json(_LLAMA | changes)


#: What the headings of both files make of a row's text.
_MADE: dict[str, Callable[[str], Any]] = {
    "a model": lambda text: _config(**json.loads(text)),
    "an engine": lambda text: EngineConfig(**json.loads(text)),
    "an engine's parameters": lambda text: EngineConfig.from_parameters(json.loads(text)),
    "sampling": SamplingParams.from_json,
}


def _plain(value: Any) -> Any:
    """With lists in place of tuples, as in JSON."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize(("kind", "text", "attributes"), table(Path(__file__).with_name("understood.txt")))
def test_what_is_given_arrives(kind: str, text: str, attributes: str) -> None:
    """Every field arrives in the type that it has, and what is not said has the default of its kind."""
    made, expected = _MADE[kind](text), json.loads(attributes)
    found = {name: _plain(getattr(made, name)) for name in expected}
    assert expected == found
    assert [type(value) for value in expected.values()] == [type(value) for value in found.values()]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [row for row in table(Path(__file__).with_name("refused.txt")) if row.values[0] in _MADE],
)
def test_what_is_refused(kind: str, text: str, words: str) -> None:
    """A wrong name, type or value, or what cannot be run as it says, is refused by name, with what is allowed."""
    with pytest.raises(InvalidArgumentError) as caught:
        _MADE[kind](text)
    assert says(words, caught.value.message), caught.value.message


@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed": 1' + "0" * 5000 + "}", json.dumps({"stop": ["x" * 10**6]})])
def test_a_refusal_does_not_repeat_what_was_sent(text: str) -> None:
    """Texts, numbers and nesting of any size are refused with a short message."""
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams.from_json(text)
    assert len(caught.value.message) < 300


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


def test_layers_without_a_window_keep_all_blocks() -> None:
    """Windows in some layers free no blocks, which hold keys and values of all layers."""
    some, all_layers = _config(architectures=["Gemma2ForCausalLM"]), _config(architectures=["MistralForCausalLM"])
    assert [0, 4096] == [kv_window(EngineConfig(), model).num_tokens for model in (some, all_layers)]


def test_what_cannot_be_planned_ahead() -> None:
    """A model of sliding windows refuses the explicit wish, not the default; one layer without a window grants it."""
    model = _config(architectures=["MistralForCausalLM"], sliding_window=8)
    EngineConfig(device="cuda").resolved(model)
    with pytest.raises(InvalidArgumentError, match="async_scheduling must be auto or false for a model whose"):
        EngineConfig(async_scheduling="true").resolved(model)
    EngineConfig(async_scheduling="true").resolved(_config())


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
    """Where neither size is set: 90 % of what is free once the weights are there; a CPU has 256 MiB."""
    model, block_bytes = _config(), 16 * 384
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_glibc_takes_the_thresholds() -> None:
    """Glibc accepts both values for memory that is retained, also a second time."""
    assert [True, True] == [retain_freed_memory(), retain_freed_memory()]
