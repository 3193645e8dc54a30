"""GGUF files, written by the package ``gguf``: what is read is what it dequantises, and malformed ones are refused."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from tests.case_files import table
from tests.unit.llm.engine_fixture import logits_of_text

from weft.base.errors import InvalidArgumentError, WeftError
from weft.llm.config import TransformerConfig
from weft.llm.models.gemma import Gemma2, Gemma3
from weft.llm.models.granite import Granite
from weft.llm.models.llama import Llama, Mixtral
from weft.llm.models.olmo2 import Olmo2
from weft.llm.models.qwen import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.weights.gguf_source import BLOCK_TYPES, to_weight
from weft.llm.weights.parts import EMBEDDING, LM_HEAD
from weft_kernels.linear import products
from weft_kernels.linear.quantized import QuantizedWeight

torch.set_num_threads(1)

_CONFIG = Llama(
    vocab_size=48,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=64,
    eos_token_ids=(2, 3),
    bos_token_id=1,
    dtype="bfloat16",
)
_TABLE = Path(__file__).with_name("gguf.txt")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are those with the numbers of the codes; where a CPU multiplies codes it rounds activations too."""
    monkeypatch.setattr(products, "has_panels", lambda dtype: False)


def _file_name(name: str, names: dict[str, str]) -> str:
    whole = {EMBEDDING: "token_embd.weight", "model.norm.weight": "output_norm.weight", LM_HEAD: "output.weight"}
    if name in whole:
        return whole[name]
    _, _, index, *module, kind = name.split(".")
    return f"blk.{index}.{(_LAYER_NAMES | names)['.'.join(module)]}.{kind}"


def _blocks(type_id: int, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Random bytes of the type, with scales of a size that numbers have."""
    block_type = BLOCK_TYPES[type_id]
    blocks = shape[1] // block_type.num_elements
    data = random.integers(0, 256, (shape[0], blocks, block_type.num_bytes)).astype(np.uint8)
    halves = {"Q6_K": [208]}.get(
        block_type.name, [0, 2] if block_type.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    )
    for start in halves:
        scales = random.uniform(0.0002, 0.002, (shape[0], blocks)).astype(np.float16)
        data[:, :, start : start + 2] = scales.view(np.uint8).reshape(shape[0], blocks, 2)
    return data.reshape(shape[0], -1)


def _in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp orders those of queries and keys of a Llama: the halves of each head in turn."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path,
    type_of: Callable[[str], GgmlType],
    *,
    config: TransformerConfig = _CONFIG,
    change: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    without: str = "",
    names: dict[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Write ``model.gguf``; returns every weight by its name in a Hugging Face folder, as numbers."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / "model.gguf", config.gguf.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_token_scores([float(number) for number in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    change(writer)
    numbers: dict[str, torch.Tensor] = {}
    experts: dict[str, list[np.ndarray]] = defaultdict(list)
    for part in (part for parts in config.weight_parts().values() for part in parts):
        name = _file_name(re.sub(r"experts\.\d+", "experts", part.name), names or {})
        kind = GgmlType.F32 if len(part.shape) == 1 or part.shape[0] == 1 else type_of(part.name)
        if kind in (GgmlType.F32, GgmlType.F16):
            stored = random.normal(1 if "norm" in name else 0, 0.1, part.shape)
            stored = stored.astype(np.float16 if kind == GgmlType.F16 else np.float32)
            weight = stored.astype(np.float32)
        else:
            stored = _blocks(int(kind), (part.shape[0], part.shape[1]), random)
            weight = gguf.quants.dequantize(stored, kind)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(part.name.split(".")[-2], 0)
        numbers[part.name] = torch.tensor(weight)
        if heads and config.gguf.has_pairs:
            stored = _in_pairs(stored, heads)
        if name.endswith("_exps.weight"):
            experts[name].append(stored)
            stored = np.stack(experts[name])
            if len(stored) < config.num_experts_of(".experts."):
                continue
        if name != without:
            writer.add_tensor(name, stored[0] if stored.shape[0] == 1 else stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def _logits(config: TransformerConfig, weights: dict[str, Any]) -> torch.Tensor:
    return logits_of_text(config, weights, torch.arange(12) * 5 % config.vocab_size)


def _fused(config: TransformerConfig, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([numbers[part.name] for part in parts]) for name, parts in config.weight_parts().items()}


_CODED = {each.name: number for number, each in BLOCK_TYPES.items() if each.dtype is None}


@pytest.mark.parametrize("kind", _CODED)
def test_every_number_of_a_type(kind: str) -> None:
    """Numbers of random blocks of each type are those that the package ``gguf`` makes of them."""
    type_id = _CODED[kind]
    data = _blocks(type_id, (6, 512), np.random.default_rng(1))
    data[0, :4] = 0  # a block without a scale
    data[1, :2] = 0
    weight = to_weight(BLOCK_TYPES[type_id], torch.from_numpy(data).flatten(), (6, 512))
    assert isinstance(weight, QuantizedWeight)
    expected = torch.tensor(gguf.quants.dequantize(data, GgmlType(type_id)))
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [*_CODED, "F16", "mixed"])
def test_model_of_a_file(tmp_path: Path, kind: str) -> None:
    """A file of any type, and of several, is the model of its numbers, with the configuration of its metadata."""
    mixed = {"v_proj": GgmlType.Q6_K, "down_proj": GgmlType.Q6_K, "gate_proj": GgmlType.Q5_0, "o_proj": GgmlType.F16}

    def type_of(name: str) -> GgmlType:
        if kind != "mixed":
            return GgmlType[kind]
        return mixed.get(name.split(".")[-2], GgmlType.Q4_K)

    numbers = _fused(_CONFIG, write_gguf(tmp_path, type_of))
    config = read_config(tmp_path)
    assert replace(_CONFIG, rms_norm_eps=config.rms_norm_eps, dtype=config.dtype) == config
    assert _CONFIG.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    assert ("float16" if kind == "F16" else "bfloat16") == config.dtype
    weights = load_folder(tmp_path, config, dtype=torch.float32)
    assert isinstance(weights[EMBEDDING], torch.Tensor)
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert {"mixed": tuple, "F16": torch.Tensor}.get(kind, QuantizedWeight) is type(weights[qkv])
    expected = _logits(config, dict(numbers))
    assert (_logits(config, weights) - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_tied_embedding_of_codes(tmp_path: Path) -> None:
    """A file without an output matrix has its embedding for that, as codes in the product."""
    config = replace(_CONFIG, tie_word_embeddings=True)
    numbers = _fused(config, write_gguf(tmp_path, lambda name: GgmlType.Q8_0, config=config))
    read = read_config(tmp_path)
    assert read.tie_word_embeddings
    weights = load_folder(tmp_path, read, dtype=torch.float32)
    assert isinstance(weights[LM_HEAD], QuantizedWeight)
    torch.testing.assert_close(_logits(read, weights), _logits(config, dict(numbers)), rtol=1e-4, atol=1e-4)


_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 5}
_CAPS = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
_SCALES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
}
_MIXTRAL = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_FOUR = {"num_experts": 4, "num_chosen": 2, "expert_size": 256}
_FOUR_ADDED = {"expert_count": 4, "expert_used_count": 2}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


@pytest.mark.parametrize(
    ("kind", "fields", "names", "added"),
    [
        (Qwen2, {"has_qkv_bias": True}, {}, {}),
        (Qwen3, {"has_qk_norm": True}, _HEAD_NORMS, {}),
        (Gemma2, _GEMMA | _CAPS | {"sliding_layers": (True, False)}, _GEMMA_NORMS, {"sliding_window": 5} | _CAPS),
        (
            Gemma3,
            _GEMMA | {"has_qk_norm": True, "sliding_layers": (True, True)},
            _GEMMA_NORMS | _HEAD_NORMS,
            {"sliding_window": 5},
        ),
        (
            Granite,
            _SCALES,
            {},
            {"embedding_scale": 12.0, "attention_scale": 0.5, "residual_scale": 0.25, "logit_scale": 8.0},
        ),
        (
            Olmo2,
            {},
            _HEAD_NORMS | {each: _GEMMA_NORMS[each] for each in _GEMMA_NORMS if "post" in each},
            {},
        ),
        (Mixtral, _FOUR, _MIXTRAL, _FOUR_ADDED),
        (
            Qwen2Moe,
            _FOUR | {"has_qkv_bias": True, "expert_size": 64, "shared_size": 96, "is_normalized": False},
            _EXPERTS,
            _FOUR_ADDED | {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
        ),
        (
            Qwen3Moe,
            _FOUR | {"has_qk_norm": True, "expert_size": 64},
            _EXPERTS | _HEAD_NORMS,
            _FOUR_ADDED | {"expert_feed_forward_length": 64},
        ),
    ],
)
def test_architectures(
    tmp_path: Path, kind: type[TransformerConfig], fields: dict[str, Any], names: dict[str, str], added: dict[str, Any]
) -> None:
    """Numbers, biases and norms arrive, those of Gemma without the 1 that files add; what files lack is derived.

    Rows of queries and keys are interleaved in files of Llama and Granite only.
    """
    config = kind(**vars(_CONFIG) | fields)

    def change(writer: gguf.GGUFWriter) -> None:
        for name, value in {"key_length": 64, "value_length": 64, **added}.items():
            getattr(writer, f"add_{name}")(value)

    numbers = _fused(config, write_gguf(tmp_path, lambda name: GgmlType.F16, config=config, change=change, names=names))
    read = read_config(tmp_path)
    assert replace(config, rms_norm_eps=read.rms_norm_eps, dtype=read.dtype) == read
    weights = load_folder(tmp_path, read, dtype=torch.float32)
    for name, expected in numbers.items():
        offset = config.norm_offset if name.endswith("norm.weight") else 0.0
        assert torch.equal(expected - offset, weights[name]), name  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("kind", ["Q4_K", "mixed"])
def test_experts_of_codes(tmp_path: Path, kind: str) -> None:
    """Experts of a layer, which are one tensor in the file, are those of its numbers, of one type or of several."""
    config = Mixtral(**vars(_CONFIG) | _FOUR)

    def change(writer: gguf.GGUFWriter) -> None:
        for name, value in _FOUR_ADDED.items():
            getattr(writer, f"add_{name}")(value)

    def type_of(name: str) -> GgmlType:
        if "gate." in name:
            return GgmlType.F32
        return GgmlType.Q8_0 if kind == "mixed" and ("w3" in name or "k_proj" in name) else GgmlType.Q4_K

    numbers = _fused(config, write_gguf(tmp_path, type_of, config=config, change=change, names=_MIXTRAL))
    weights = load_folder(tmp_path, read_config(tmp_path), dtype=torch.float32)
    experts = weights["model.layers.1.mlp.experts.gate_up_proj.weight"]
    assert (tuple if kind == "mixed" else QuantizedWeight) is type(experts)
    expected = _logits(config, dict(numbers))
    assert (_logits(config, weights) - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))
    write_gguf(tmp_path, type_of, config=replace(config, num_experts=3), change=change, names=_MIXTRAL)
    _fails(tmp_path, "'blk.0.ffn_gate_inp.weight' must have shape [4, 256], got [3, 256]")


def test_llama3_factors(tmp_path: Path) -> None:
    """Factors of wavelengths are those of Llama 3's scaling, by the largest; others are refused."""
    half = _CONFIG.head_dim // 2
    lengths = 2 * np.pi * 10000.0 ** (np.arange(half) / half)
    smooth = np.clip((8192 / lengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    write_gguf(tmp_path, lambda name: GgmlType.F16, change=lambda file: file.add_tensor("rope_freqs.weight", factors))
    rope = read_config(tmp_path).rope
    assert ("llama3", 8.0, 8192.0) == (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"])
    assert load_folder(tmp_path, read_config(tmp_path))
    wrong = np.linspace(1, 9, half, dtype=np.float32)
    write_gguf(tmp_path, lambda name: GgmlType.F16, change=lambda file: file.add_tensor("rope_freqs.weight", wrong))
    _fails(tmp_path, "'rope_freqs.weight' must have the factors of Llama 3, got others, up to 9.0")


def _fails(folder: Path, *messages: str, kind: type[WeftError] = InvalidArgumentError) -> None:
    with pytest.raises(kind) as caught:
        load_folder(folder, read_config(folder))
    assert [] == [message for message in messages if message not in str(caught.value)], str(caught.value)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """Wherever a file ends too early, it is said to be torn, with its size."""
    write_gguf(tmp_path, lambda name: GgmlType.Q8_0)
    path = tmp_path / "model.gguf"
    data = path.read_bytes()
    for size in (1, 4, 20, 24, 100, 400, 1500, 3000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        _fails(tmp_path, f"model.gguf ({size} bytes) is torn or no GGUF file", "fetch it again")
    path.write_bytes(b"")
    _fails(tmp_path, "must be a GGUF file, got an empty one")


@pytest.mark.parametrize(("data", "words"), table(_TABLE, "file"))
def test_headers_that_lie(tmp_path: Path, data: str, words: str) -> None:
    """Lengths, types and texts that are impossible are errors at once, however large they are."""
    (tmp_path / "model.gguf").write_bytes(bytes.fromhex(data))
    _fails(tmp_path, words)


@pytest.mark.parametrize(("text", "words"), table(_TABLE, "metadata"))
def test_models_that_are_not_supported(tmp_path: Path, text: str, words: str) -> None:
    """Metadata of another kind of model is refused, with its key, the value and what it must be."""
    name, _, value = text.partition(" ")

    def replaced(writer: gguf.GGUFWriter) -> None:
        values = writer.kv_data[-1]
        known = dict(values)
        values.clear()
        if name.startswith("add_"):
            getattr(writer, name)(json.loads(value))
        else:
            writer.add_array(name, json.loads(value))
        values.update(known | values)

    write_gguf(tmp_path, lambda name: GgmlType.F16, change=replaced)
    _fails(tmp_path, words)


def test_a_tensor_of_another_model(tmp_path: Path) -> None:
    """A tensor that the model has no use for is an error."""
    name, surplus = "blk.0.ffn_up_exps.weight", np.ones(3, np.float32)
    write_gguf(tmp_path, lambda name: GgmlType.F16, change=lambda file: file.add_tensor(name, surplus))
    _fails(tmp_path, "is not part of the model")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """A tensor that is missing, or of another shape or type, is named."""
    write_gguf(tmp_path, lambda name: GgmlType.Q8_0, without="blk.1.ffn_up.weight")
    _fails(tmp_path, "model.gguf: 'blk.1.ffn_up.weight' is missing; it is not the whole model")
    write_gguf(tmp_path, lambda name: GgmlType.Q8_0, without="token_embd.weight")
    _fails(tmp_path, "'token_embd.weight' is missing")
    write_gguf(tmp_path, lambda name: GgmlType.F16)
    path = tmp_path / "model.gguf"
    with pytest.raises(InvalidArgumentError, match=r"'blk\.0\.ffn_gate\.weight' must have shape \[128, 256\], got"):
        load_folder(tmp_path, replace(_CONFIG, intermediate_size=128))
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 16
    assert 1 == data[place]
    path.write_bytes(data[:place] + bytes([10]) + data[place + 1 :])
    _fails(tmp_path, "'blk.0.attn_q.weight' must have one of the types F32, F16, Q4_0", "got number 10")
    assert 48 == read_config(tmp_path).vocab_size


def test_several_files(tmp_path: Path) -> None:
    """Of several files none is the model; a folder with safetensors is read as one of Hugging Face."""
    write_gguf(tmp_path, lambda name: GgmlType.Q8_0)
    (tmp_path / "other.gguf").write_bytes(b"")
    _fails(tmp_path, "must have one .gguf file, got 2: model.gguf, other.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeftError, match=r"no config\.json"):
        read_config(tmp_path)
