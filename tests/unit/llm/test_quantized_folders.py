"""Quantised folders of every format: what is read is what was written, and malformed ones are refused at load."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.case_files import says, table
from tests.unit.llm.engine_fixture import logits_of_text
from tests.unit.llm.quantized_folders import CONFIG, EXPERTS, FORMATS, Tensors, gptq, save_folder

from weft.base.errors import InvalidArgumentError
from weft.llm.config import TransformerConfig
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft_kernels.linear import products
from weft_kernels.linear.products import Matrix
from weft_kernels.linear.quantized import QuantizedWeight

torch.set_num_threads(1)

_Q, _K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
_DOWN = "model.layers.1.mlp.down_proj"
_TABLE = Path(__file__).with_name("malformed.txt")


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are those with the numbers of the codes; where a CPU multiplies codes it rounds activations too."""
    monkeypatch.setattr(products, "has_panels", lambda dtype: False)


def _numbers(weight: Matrix) -> torch.Tensor:
    if isinstance(weight, tuple):
        return torch.cat([_numbers(part) for part in weight])
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def _logits(weights: dict[str, Any]) -> torch.Tensor:
    """Of every position of a text of 20 tokens."""
    return logits_of_text(CONFIG, weights, torch.arange(20) * 7 % CONFIG.vocab_size)


def _assert_logits(numbers: Tensors, weights: dict[str, Any]) -> None:
    """Logits are those of the numbers, but that products with codes round activations to 8 bits."""
    exact = _logits(dict(numbers))
    assert (_logits(weights) - exact).norm() <= 0.1 * exact.norm()


def _fused(numbers: Tensors, config: TransformerConfig = CONFIG) -> Tensors:
    return {name: torch.cat([numbers[part.name] for part in parts]) for name, parts in config.weight_parts().items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_read_is_what_was_written(tmp_path: Path, kind: str) -> None:
    """Every number of every format is that which was written, and logits are those of the numbers."""
    writer, quantization = FORMATS[kind]
    expected = _fused(save_folder(tmp_path, writer, quantization))
    weights = load_folder(tmp_path, read_config(tmp_path))
    assert expected.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(_numbers(weight), expected[name], rtol=1e-6, atol=1e-7)
    is_packed = [isinstance(weight, QuantizedWeight) for name, weight in weights.items() if "_proj" in name]
    is_of_numbers = any(word in kind for word in ("fp8", "across", "one element"))  # codes cannot have such groups
    assert is_of_numbers != all(is_packed)
    assert is_of_numbers != any(is_packed)
    _assert_logits(expected, weights)


@pytest.mark.parametrize("kind", FORMATS)
def test_experts(tmp_path: Path, kind: str) -> None:
    """Experts of every format, each with its own tensors, are those that were written; the router is numbers."""
    expected = _fused(save_folder(tmp_path, *FORMATS[kind], config=EXPERTS), EXPERTS)
    weights = load_folder(tmp_path, read_config(tmp_path))
    assert expected.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(_numbers(weight), expected[name], rtol=1e-6, atol=1e-7)
    exact, got = (logits_of_text(EXPERTS, dict(each), torch.arange(20)) for each in (expected, weights))
    assert (got - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("kind", ["gptq", "awq", "nf4 double", "bitsandbytes 8 bits", "fp8", "compressed"])
def test_modules_that_are_not_quantised(tmp_path: Path, kind: str) -> None:
    """A module that is left as it was is read as it is, alone and beside one of codes in a fused product."""
    writer, quantization = FORMATS[kind]
    plain = ("lm_head", _K, _DOWN)
    quantization = quantization | {"modules_to_not_convert": list(plain)}
    expected = _fused(save_folder(tmp_path, writer, quantization, is_plain=lambda module: module in plain))
    weights = load_folder(tmp_path, CONFIG)
    assert isinstance(weights[f"{_DOWN}.weight"], torch.Tensor)
    assert (kind == "fp8") != isinstance(weights["model.layers.0.self_attn.qkv_proj.weight"], tuple)
    _assert_logits(expected, weights)


def test_lm_head_of_codes(tmp_path: Path) -> None:
    """A quantised LM head is one of codes."""
    save_folder(tmp_path, *FORMATS["gptq"], is_plain=lambda module: False)
    assert isinstance(load_folder(tmp_path, CONFIG)["lm_head.weight"], QuantizedWeight)


def test_layers_of_several_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of 4 and 8 bits and of other groups stand in one folder; unlike parts stay apart, which the log says."""

    def mixed(module: str, shape: tuple[int, int], random: np.random.Generator) -> Any:
        kinds = {_Q: gptq(8), _DOWN: gptq(8, group_size=64)}
        return kinds.get(module, gptq())(module, shape, random)

    expected = _fused(save_folder(tmp_path, mixed, FORMATS["gptq"][1] | {"dynamic": {}}))
    with caplog.at_level(logging.INFO, "weft.llm"):
        weights = load_folder(tmp_path, CONFIG)
    qkv, down = weights["model.layers.0.self_attn.qkv_proj.weight"], weights[f"{_DOWN}.weight"]
    assert isinstance(qkv, tuple)
    assert [8, 4, 4] == [part.num_bits for part in qkv if isinstance(part, QuantizedWeight)]
    assert isinstance(down, QuantizedWeight)
    assert (8, 64) == (down.num_bits, down.group_size)
    _assert_logits(expected, weights)
    assert "weights of gptq: 8 of 9 matrices have codes; 1 are products of several parts" in caplog.text


def test_configuration_beside_the_model(tmp_path: Path) -> None:
    """Of early GPTQ folders the configuration is in a file of its own, and layers have biases of zeros."""
    expected = _fused(save_folder(tmp_path, FORMATS["gptq"][0], None))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    _change(tmp_path, lambda tensors: tensors.update({f"{_Q}.bias": torch.zeros(64)}))
    weights = load_folder(tmp_path, CONFIG)
    assert torch.equal(_numbers(weights[f"{_DOWN}.weight"]), expected[f"{_DOWN}.weight"])
    _change(tmp_path, lambda tensors: tensors.update({f"{_Q}.bias": torch.ones(64)}))
    _fails(tmp_path, f"'{_Q}.bias' must be zeros or absent")


def _change(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _fails(folder: Path, *messages: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_folder(folder, CONFIG)
    assert all(says(message, str(caught.value)) for message in messages), str(caught.value)


@pytest.mark.parametrize(("text", "words"), table(_TABLE, "a configuration of gptq"))
def test_unsupported_methods(tmp_path: Path, text: str, words: str) -> None:
    """A method, a number of bits or a version that is not supported is refused, with what is and what to do."""
    save_folder(tmp_path, FORMATS["gptq"][0], json.loads(text))
    _fails(tmp_path, words, "take another quantisation of the model")


def test_codes_without_a_configuration(tmp_path: Path) -> None:
    """Codes that the configuration says nothing about are no weights of the model."""
    save_folder(tmp_path, FORMATS["gptq"][0], None)
    _fails(tmp_path, "down_proj.weight'", "missing")


def _changed(change: str) -> Callable[[Tensors], Any]:
    """A change of tensors by the words of ``malformed.txt``."""
    words = change.replace("Q.", f"{_Q}.").replace("STATE", f"{_Q}.weight.quant_state.bitsandbytes__nf4").split(" ", 3)
    if words[0] == "without":
        return lambda tensors: tensors.pop(words[1])
    if words[1] == "text":
        tensor = torch.tensor(list(" ".join(words[3:]).encode()), dtype=torch.uint8)
    else:
        tensor = torch.full(json.loads(words[2]), float(words[3]), dtype=getattr(torch, words[1]))
    return lambda tensors: tensors.update({words[0]: tensor})


@pytest.mark.parametrize(("kind", "change", "words"), [row for row in table(_TABLE) if row.values[0] in FORMATS])
def test_malformed_folders(tmp_path: Path, kind: str, change: str, words: str) -> None:
    """A tensor that is missing, of another shape or type, or has impossible values is named, with what it must be."""
    save_folder(tmp_path, *FORMATS[kind])
    _change(tmp_path, _changed(change))
    _fails(tmp_path, words.replace("Q.", f"{_Q}.").replace("STATE", f"{_Q}.weight.quant_state.bitsandbytes__nf4"))


def test_blocks_larger_than_the_weight_take_no_memory(tmp_path: Path) -> None:
    """A block size that a file claims is not what is allocated."""
    writer, quantization = FORMATS["fp8 by block"]
    expected = save_folder(tmp_path, writer, quantization)

    def one_scale_per_32_inputs(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            inputs = tensors[name.removesuffix("_scale_inv")].shape[1]
            tensors[name] = torch.ones(1, inputs // 32)

    _change(tmp_path, one_scale_per_32_inputs)
    _configure(tmp_path, quantization_config=quantization | {"weight_block_size": [10**15, 32]})
    assert _fused(expected).keys() == load_folder(tmp_path, read_config(tmp_path)).keys()


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"max_position_embeddings": 10**30},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e30, "rope_theta": 1e4}},
    ],
)
def test_sizes_that_nothing_has(tmp_path: Path, change: dict[str, Any]) -> None:
    """Layers and positions are limited before anything is made of them."""
    save_folder(tmp_path, *FORMATS["gptq"])
    _configure(tmp_path, **change)
    with pytest.raises(InvalidArgumentError, match="must be at most"):
        read_config(tmp_path)


def test_ends_outside_of_the_vocabulary(tmp_path: Path) -> None:
    """An end-of-text token without a logit is left out: `min_tokens` forbids ends by their place in the logits."""
    save_folder(tmp_path, *FORMATS["gptq"])
    _configure(tmp_path, eos_token_id=[3, CONFIG.vocab_size, 10**12])
    assert read_config(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_tensor_may_be_missing(tmp_path: Path, kind: str) -> None:
    """A module without one of its tensors is an error that names it, unless the format can do without the tensor."""
    save_folder(tmp_path, *FORMATS[kind])
    whole = load_file(tmp_path / "model.safetensors")
    optional = ("g_idx", "weight_g_idx", "weight_shape", "input_scale", "weight_format", "weight_zero_point")
    needed = [("gptq act-order", f"{_Q}.g_idx"), ("gptq 8 bits act-order", f"{_Q}.g_idx")]
    for name in [name for name in whole if name.startswith(_Q)]:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, tmp_path / "model.safetensors")
        if name.rpartition(".")[2] in optional and (kind, name) not in needed:
            load_folder(tmp_path, CONFIG)
        else:
            _fails(tmp_path, _Q)
