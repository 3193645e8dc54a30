"""gpt-oss as it is published, experts in MXFP4: read as codes, with the logits that transformers computes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.case_files import says
from tests.unit.llm.engine_fixture import Answer, logits_of_text
from tests.unit.llm.test_architectures import _serve

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.llm.models.gpt_oss import GptOss
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.tools.quantize.quantize_folder import quantize_folder
from weft_kernels.linear import products
from weft_kernels.linear.quantized import QuantizedWeight

torch.set_num_threads(1)

_NUM_EXPERTS, _WIDTH, _SIZE = 4, 64, 96
_EXPERTS = "model.layers.0.mlp.experts."
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TEXT = torch.arange(20) * 7 % 128


def write_models(path: Path) -> tuple[Path, Path]:
    """Folders of a small random model as it is published, and of the numbers that its codes stand for."""
    import transformers

    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=_WIDTH, intermediate_size=_SIZE, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, num_local_experts=_NUM_EXPERTS,
        num_experts_per_tok=2, sliding_window=11,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
            "rope_theta": 500.0,
        },
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(6.0) if parameter.dim() == 2 else parameter.data.add_(torch.randn_like(parameter) * 0.2)
    folder, plain = path / "published", path / "plain"
    model.save_pretrained(folder)
    model.save_pretrained(plain)
    tensors = load_file(folder / "model.safetensors")
    numbers = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        groups = (num_experts, outputs, inputs // 32)
        tensors[name + "_blocks"] = torch.randint(0, 256, (*groups, 16)).to(torch.uint8)
        tensors[name + "_scales"] = torch.randint(121, 125, groups).to(torch.uint8)
        values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
        pairs = torch.stack((tensors[name + "_blocks"] & 15, tensors[name + "_blocks"] >> 4), -1).flatten(3)
        scales = torch.exp2(tensors[name + "_scales"].float() - 127)
        numbers[name] = (values[pairs.int()] * scales[..., None]).flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    fields = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, plain


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as published."""
    return write_models(tmp_path_factory.mktemp("gpt-oss"))[0]


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    """What transformers computes of the folder, whose codes it turns into numbers."""
    import transformers

    model = transformers.GptOssForCausalLM.from_pretrained(
        published, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        return model(_TEXT[None]).logits[0]


def _logits(folder: Path) -> torch.Tensor:
    config = read_config(folder)
    return logits_of_text(config, dict(load_folder(folder, config)), _TEXT)


def test_logits_are_those_of_transformers(published: Path, expected: torch.Tensor, monkeypatch: Any) -> None:
    """Every expert has its codes; where products are those with the numbers of the codes, logits agree within 1e-4."""
    config = read_config(published)
    assert isinstance(config, GptOss)
    weights = load_folder(published, config)
    of_experts = [weight for name, weight in weights.items() if "experts" in name and name.endswith("weight")]
    assert [QuantizedWeight] * 4 == [type(weight) for weight in of_experts]
    rounded = _logits(published)  # where a CPU multiplies codes it rounds activations too
    assert (rounded - expected).norm() <= 0.05 * expected.norm()
    monkeypatch.setattr(products, "has_panels", lambda dtype: False)
    assert (_logits(published) - expected).abs().max() < 1e-4


def _changed(published: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **fields: Any) -> Path:
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((published / "config.json").read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(_EXPERTS + "down_proj_scales"), "down_proj_scales' is missing"),
        (lambda tensors: tensors.pop(_EXPERTS + "down_proj_blocks"), "down_proj' is missing"),
        (lambda tensors: tensors.pop(_EXPERTS + "down_proj_bias"), "down_proj_bias' is missing"),
        (lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"), "self_attn.sinks' is missing"),
        (
            lambda tensors: tensors.update({_EXPERTS + "gate_up_proj_scales": torch.zeros(4, 192, 3).byte()}),
            "gate_up_proj_scales' in ... must have shape [4, 192, 2], got [4, 192, 3]",
        ),
        (
            lambda tensors: tensors.update({_EXPERTS + "down_proj_blocks": torch.zeros(4, 64, 3, 16)}),
            "down_proj_blocks' in ... must have one of the types U8, got F32",
        ),
        (lambda tensors: tensors[_EXPERTS + "down_proj_scales"][1, 2].fill_(255), "down_proj' must be finite"),
    ],
)
def test_torn_folders(published: Path, tmp_path: Path, change: Any, words: str) -> None:
    """A tensor that is missing, of another shape or type, or has scales that are not numbers is refused by name."""
    with pytest.raises(InvalidArgumentError) as caught:
        _logits(_changed(published, tmp_path, change))
    assert says(words, str(caught.value)), str(caught.value)


def test_groups_that_do_not_fit(published: Path, tmp_path: Path) -> None:
    """Inputs that are no multiple of 32 have no blocks."""
    folder = _changed(published, tmp_path, lambda tensors: None, intermediate_size=80)
    with pytest.raises(InvalidArgumentError, match="a weight whose inputs are a multiple of 32, got 80"):
        _logits(folder)


def test_scales_of_any_size(published: Path, tmp_path: Path) -> None:
    """Scales beyond float16 are kept as float32."""
    name = _EXPERTS + "down_proj_scales"
    folder = _changed(published, tmp_path, lambda tensors: tensors[name][0, 0].fill_(80))
    weight = load_folder(folder, read_config(folder))[_EXPERTS + "down_proj.weight"]
    assert isinstance(weight, QuantizedWeight)
    assert 2.0**-47 == weight.scales[:, 0].unique().item()


def test_served_as_codes(published: Path) -> None:
    """The engine gives the same tokens alone, beside others in small steps, from the prefix cache and with drafts."""
    prompts = [[7 * number % 128 for number in range(start, start + 25)] for start in (0, 3, 11)]

    def answers() -> list[Answer]:
        return [Answer(prompt, max_tokens=8) for prompt in prompts]

    alone = answers()
    _serve(published, [[answer] for answer in alone], deterministic=True, enable_prefix_caching=False)
    for settings in ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"speculation": "ngram"}):
        first, again = answers(), answers()
        _serve(published, [first, again], deterministic=True, **settings)
        assert [answer.text for answer in alone] == [answer.text for answer in first]
        assert [answer.text for answer in alone] == [answer.text for answer in again]


def test_quantising_is_refused(published: Path, tmp_path: Path) -> None:
    """Neither codes nor experts that are stored together are quantised."""
    with pytest.raises(InvalidArgumentError, match="is quantised already"):
        quantize_folder(published, tmp_path, tmp_path / "out", method="int4", max_loss=0.1)
    fields = json.loads((published / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if n != "quantization_config"}))
    with pytest.raises(UnsupportedError, match="has all experts of a layer in one tensor"):
        quantize_folder(tmp_path, tmp_path, tmp_path / "out", method="int4", max_loss=0.1)
