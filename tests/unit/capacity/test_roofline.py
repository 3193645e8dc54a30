"""Times on a device by its figures."""

from dataclasses import replace

import pytest

from weft.capacity.costs import BatchCost, Operation
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.devices import DeviceSpec
from weft.capacity.roofline import DeviceTarget, interpolated, level, on_grid
from weft.llm.config import EngineConfig
from weft.llm.models.llama import Mixtral
from weft.llm.models.model_config import TransformerConfig

DEVICE = DeviceSpec("d", 80 << 30, 1e12, {"fp32": 1e14}, compute_share=1.0, bandwidth_share=1.0, kernel_s=0.0)
#: That of Llama 3.1 8B.
LLAMA = TransformerConfig(128256, 4096, 14336, 32, 32, 8, 128, 131072, rope={"rope_theta": 5e5}, dtype="bfloat16")


def product(rows: int, side: int, kind: str = "fp32") -> BatchCost:
    """A batch of one product with a square weight."""
    operation = Operation("product", 2.0 * rows * side**2, 4 * side**2, 8 * rows * side, kind, (rows, side, side))
    return BatchCost(rows, (operation,), 0, 0, 0)


def test_few_rows_wait_for_the_weights_and_many_for_arithmetic() -> None:
    """A weight of 4096 x 4096 floats is 67 MB: 67 us at 1 TB/s."""
    target = DeviceTarget(DEVICE)
    few, many = (target.batch("pytorch", 1, product(rows, 4096)) for rows in (1, 4096))
    assert (few.bound, many.bound) == ("memory", "compute")
    assert few.seconds == pytest.approx((4 * 4096**2 + 8 * 4096) / 1e12)
    assert many.seconds == pytest.approx(2 * 4096**3 / 1e14)


def test_a_cpu_without_a_peak_of_16_bits_emulates_their_products_in_torch() -> None:
    """They cost a multiple of those of float32; with a peak, in ONNX Runtime, or on a GPU they do not."""
    cpu = DeviceSpec("c", 8 << 30, 1e12, {"fp32": 1e11}, is_cpu=True, kernel_s=0.0)
    able = replace(cpu, flops_per_s={"fp32": 1e11, "bf16": 2e11})

    def seconds(device: DeviceSpec, backend: str, kind: str) -> float:
        return DeviceTarget(device).batch(backend, 1, product(4096, 4096, kind)).seconds

    wide_s = seconds(cpu, "pytorch", "fp32")
    assert seconds(cpu, "pytorch", "bf16") == pytest.approx(60 * wide_s)
    assert seconds(able, "pytorch", "bf16") == pytest.approx(wide_s / 2)
    assert seconds(cpu, "onnxruntime", "fp16") == pytest.approx(wide_s)
    assert seconds(DEVICE, "pytorch", "bf16") == seconds(DEVICE, "pytorch", "fp32")


def test_an_8b_llama_on_an_h200_has_the_published_floor() -> None:
    """3.5 ms a token alone at 4.3 TB/s, 8 us more for each 1000 tokens of each sequence."""
    model = LanguageModel(LLAMA, EngineConfig(dtype="bfloat16", device="cuda"))
    device = DeviceSpec("H200", 141 << 30, 4.3e12, {"bf16": 788e12}, compute_share=1.0, bandwidth_share=1.0)
    assert model.kv_bytes_per_token == 131072
    assert model.matrix_bytes == pytest.approx(15.01e9, rel=0.001)
    timer = DeviceTarget(device)
    assert timer.decode(model, 1, 1024).seconds == pytest.approx(3.52e-3, rel=0.15)
    assert timer.decode(model, 64, 1024).seconds == pytest.approx(5.49e-3, rel=0.1)
    assert timer.prefill(model, 2048, 2048).seconds == pytest.approx(37.7e-3, rel=0.05)
    assert timer.ridge(model) == pytest.approx(183, rel=0.02)


def test_a_mixture_of_experts_reads_those_that_its_tokens_choose() -> None:
    """Of Mixtral 8x7B, 46.7 billion weights, a token multiplies 12.9; 64 tokens read nearly all of them."""
    config = Mixtral(
        32000, 4096, 14336, 32, 32, 8, 128, 32768, dtype="bfloat16", num_experts=8, num_chosen=2, expert_size=14336
    )
    model = LanguageModel(config, EngineConfig(dtype="bfloat16", device="cuda"))
    assert model.weight_bytes == pytest.approx(2 * 46.7e9, rel=0.01)
    assert config.num_multiplied + config.num_head == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01)
    assert model.read_bytes(1) == pytest.approx(2 * (config.num_multiplied + config.num_head))
    assert 0.99 * model.matrix_bytes < model.read_bytes(64) < model.matrix_bytes
    timer = DeviceTarget(replace(DEVICE, flops_per_s={"bf16": 788e12}, is_cpu=True))
    assert timer.decode(model, 1, 16).seconds == pytest.approx(25.5e-3, rel=0.02)
    assert timer.decode(model, 8, 16).seconds == pytest.approx(93e-3 * (1 - 0.75**8), rel=0.03)


def test_a_window_bounds_what_a_token_reads() -> None:
    """However long the sequence is."""
    config = TransformerConfig(64, 64, 64, 2, 2, 2, 32, 4096, rope={"rope_theta": 1e4}, sliding_window=100)
    model = LanguageModel(config, EngineConfig(dtype="float32"))
    assert model.read_kv_bytes(4000) == model.read_kv_bytes(100) == 100 * model.kv_bytes_per_token
    assert model.sequence_bytes(4000) == model.sequence_bytes(3000)


def test_curves_go_through_their_points_and_extend_as_sizes_do() -> None:
    """Times are constant below the smallest size and proportional beyond the largest; rates constant beyond both."""
    points = [(1.0, 2.0), (100.0, 20.0)]
    assert [interpolated(points, x) for x in (0.5, 1, 100, 1000)] == pytest.approx([2, 2, 20, 200])
    assert interpolated(points, 10) == pytest.approx((2 * 20) ** 0.5)
    assert [level(points, x) for x in (0.1, 1000)] == [2, 20]
    grid = [(x, y, x * y) for x in (1.0, 10.0) for y in (1.0, 100.0)]
    assert on_grid(grid, 10, 10) == pytest.approx(100)
    assert on_grid(grid, 1000, 1e9) == pytest.approx(1000)
