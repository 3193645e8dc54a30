"""Products with weights of 4 and 8 bits: the kernels against the product with the dequantised weight."""

from dataclasses import replace

import pytest
import torch

from weft_kernels.linear import lowbit_triton_kernel
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4

NUM_OUTPUTS, NUM_INPUTS = 70, 192  # more than a tile of columns, and no multiple of one


def make_weight(kind: str, place, num_inputs: int = NUM_INPUTS) -> QuantizedWeight:
    """A weight of unit rows with codes of every way."""
    weight = place.randn(NUM_OUTPUTS, num_inputs, seed=1).float().cpu() / num_inputs**0.5
    weight[0] *= 3.0  # so that scales differ
    match kind:
        case "int8":
            made = quantize_linear(weight, 8)
        case "int8 in groups, asymmetric":
            made = quantize_linear(weight, 8, 16, is_symmetric=False)
        case "int4":
            made = quantize_linear(weight, 4, 64)
        case "int4 asymmetric":
            made = quantize_linear(weight, 4, 32, is_symmetric=False, scales_dtype=torch.float16)
        case "nf4":
            made = quantize_nf4(weight, 64)
        case "int4 in odd groups":
            made = quantize_linear(weight, 4, 24, is_symmetric=False)
        case "permuted":
            order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))
            made = replace(quantize_linear(weight[:, order], 4, 32, is_symmetric=False), permutation=order)
        case _:
            raise ValueError(kind)
    return made.to(place.device)


KINDS = (
    "int8", "int8 in groups, asymmetric", "int4", "int4 asymmetric", "nf4", "int4 in odd groups", "permuted",
)  # fmt: skip


def check(place, kind: str, num_rows: int, *, module=lowbit_triton_kernel, deterministic=False, has_bias=True) -> None:
    """The product is that with the dequantised weight; entries are of about unit size."""
    weight = make_weight(kind, place)
    x = place.randn(num_rows, NUM_INPUTS)
    bias = place.randn(NUM_OUTPUTS, seed=2) if has_bias else None
    expected = x.double() @ weight.dequantize(torch.float32).double().t()
    if bias is not None:
        expected += bias.double()
    place.assert_close(expected / 4, module.linear(x, weight, bias, deterministic=deterministic) / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "num_processors"), [(1, 1), (1, 132), (3, 132), (35, 1), (70, 1)])
def test_it_is_the_product_with_the_dequantised_weight(place, monkeypatch, kind, num_rows, num_processors):
    """One row, a few and many, over odd sizes, with the inputs whole and in parts."""
    monkeypatch.setattr(lowbit_triton_kernel, "num_processors", lambda device: num_processors)
    monkeypatch.setattr(lowbit_triton_kernel, "_MIN_TILES_PER_PART", 1)
    check(place, kind, num_rows, has_bias=num_rows != 35)


@pytest.mark.parametrize("kind", ["int8", "int4 asymmetric", "int4 in odd groups"])
def test_it_is_so_where_it_is_deterministic(place_float32, kind, monkeypatch):
    """The form with one shape of tiles is the same product."""
    monkeypatch.setattr(lowbit_triton_kernel, "num_processors", lambda device: 132)
    check(place_float32, kind, 66, deterministic=True)


@pytest.mark.parametrize("num_inputs", [130, 34])
def test_inputs_that_are_no_multiple_of_a_tile(place_float32, num_inputs):
    """With a scale for each output the last tile of inputs is cut."""
    for bits in (4, 8):
        weight = place_float32.randn(NUM_OUTPUTS, num_inputs, seed=1).cpu() / num_inputs**0.5
        quantized = quantize_linear(weight, bits, is_symmetric=False).to(place_float32.device)
        for num_rows in (1, 3):
            x = place_float32.randn(num_rows, num_inputs)
            expected = x.double() @ quantized.dequantize().double().t()
            place_float32.assert_close(expected, lowbit_triton_kernel.linear(x, quantized))


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("kind", ["int8", "int4 asymmetric"])
def test_a_row_is_bitwise_its_own(place_float32, kind, monkeypatch):
    """Deterministic: alone, in part of the batch and in another order, a row's product is the same."""
    monkeypatch.setattr(lowbit_triton_kernel, "num_processors", lambda device: 132)
    weight, x = make_weight(kind, place_float32), place_float32.randn(66, NUM_INPUTS)
    together = lowbit_triton_kernel.linear(x, weight, deterministic=True)
    for rows in (slice(0, 1), slice(60, 66), slice(65, 66)):
        assert torch.equal(together[rows], lowbit_triton_kernel.linear(x[rows], weight, deterministic=True)), rows
    order = torch.randperm(66, generator=torch.Generator().manual_seed(3)).to(place_float32.device)
    assert torch.equal(together[order], lowbit_triton_kernel.linear(x[order], weight, deterministic=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_written_out_as_the_layout_says(place, kind):
    """Many rows are multiplied with numbers that are bitwise those of the layout, or one rounding from them."""
    weight = make_weight(kind, place)
    expected = weight.dequantize(torch.float32).t()
    numbers = lowbit_triton_kernel.dequantize(weight, place.dtype)
    assert place.dtype == numbers.dtype
    assert (numbers.float() - expected).abs().max() <= expected.abs().max() * torch.finfo(place.dtype).eps


def test_parts_follow_from_the_weight_alone(monkeypatch):
    """A small weight is shared out over its inputs so that every processor has some; a large one is not."""
    monkeypatch.setattr(lowbit_triton_kernel, "num_processors", lambda device: 132)

    def parts(num_outputs: int, num_inputs: int, columns: int) -> int:
        codes = torch.empty(num_inputs // 2, num_outputs, dtype=torch.uint8)
        scales = torch.empty(num_inputs // 128, num_outputs)
        weight = QuantizedWeight(codes, scales, 128, (num_outputs, num_inputs), 4)
        inner = lowbit_triton_kernel.inputs_per_tile(weight, 128)
        return lowbit_triton_kernel.num_parts(weight, columns, inner)

    assert 8 == parts(4096, 4096, 64)
    assert 16 == parts(4096, 4096, 256)  # of 32 tiles of inputs
    assert 1 == parts(128_256, 4096, 64)


def test_no_rows_are_no_work(place_float32):
    """An empty batch has an empty product."""
    weight = make_weight("int4", place_float32)
    assert (0, NUM_OUTPUTS) == lowbit_triton_kernel.linear(place_float32.randn(0, NUM_INPUTS), weight).shape


def test_the_kernel_refuses_codes_in_another_layout(place_float32):
    """Which it would read wrongly."""
    weight, x = make_weight("int4", place_float32), place_float32.randn(3, NUM_INPUTS)
    with pytest.raises(ValueError, match=r"codes of the weight is on \S+ with strides"):
        lowbit_triton_kernel.linear(x, replace(weight, codes=weight.codes.t().contiguous().t()))
