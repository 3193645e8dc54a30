"""Weights of a few bits: the packed layout, element by element, and the error of rounding to it."""

from dataclasses import replace

import pytest
import torch

from weft_kernels.linear.quantized import QuantizedWeight, concatenate, linear, pack
from weft_kernels.linear.quantizers import NF4_VALUES, quantize_linear, quantize_nf4

torch.set_num_threads(1)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _element(weight: QuantizedWeight, output: int, row: int) -> float:
    """The number of one code, by the words of the layout alone."""
    if weight.num_bits == 8:
        code = int(weight.codes[row, output])
    else:
        byte = int(weight.codes[row // 2, output])
        code = byte // 16 if row % 2 else byte % 16
    group = row // weight.group_size
    scale = float(weight.scales[group, output])
    if weight.lookup is not None:
        return float(weight.lookup[code]) * scale
    zero = 2.0 ** (weight.num_bits - 1) if weight.zeros is None else float(weight.zeros[group, output])
    return (code - zero) * scale


def _kinds(weight: torch.Tensor) -> dict[str, QuantizedWeight]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    return {
        "int8": quantize_linear(weight, 8),
        "int8 in groups": quantize_linear(weight, 8, 8, is_symmetric=False),
        "int4": quantize_linear(weight, 4, 8),
        "int4 asymmetric": quantize_linear(weight, 4, 8, is_symmetric=False, scales_dtype=torch.float16),
        "nf4": quantize_nf4(weight, 8),
        "permuted": replace(quantize_linear(weight[:, order], 4, 8), permutation=order),
    }


@pytest.mark.parametrize("kind", _kinds(_normal(2, 8)))
def test_every_element_is_that_of_the_layout(kind: str) -> None:
    """Each number is its code, zero point and scale as the layout says, at the input that its row stands for."""
    weight = _kinds(_normal(6, 24))[kind]
    numbers = weight.dequantize()
    assert (6, 24) == numbers.shape
    for output in range(6):
        for row in range(24):
            place = row if weight.permutation is None else int(weight.permutation[row])
            assert _element(weight, output, row) == pytest.approx(float(numbers[output, place]), rel=1e-6, abs=1e-9)
    assert torch.equal(numbers.to(torch.bfloat16), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("num_bits", [4, 8])
def test_packing_loses_nothing(num_bits: int) -> None:
    """Every code comes back from where it was packed."""
    codes = torch.randint(0, 2**num_bits, (32, 5), generator=torch.Generator().manual_seed(1))
    weight = QuantizedWeight(pack(codes, num_bits), torch.ones(4, 5), 8, (5, 32), num_bits)
    assert torch.equal(codes, weight.unpacked().long())


@pytest.mark.parametrize(
    ("num_bits", "group_size", "is_symmetric", "error"),
    [(8, 0, True, 0.0087), (8, 128, True, 0.0065), (4, 128, True, 0.118), (4, 128, False, 0.1), (4, 32, False, 0.078)],
)
def test_error_of_linear_codes(num_bits: int, group_size: int, is_symmetric: bool, error: float) -> None:
    """Normal weights come back within a tenth more than the error that rounding to so many codes has."""
    weight = _normal(512, 1024)
    rounded = quantize_linear(weight, num_bits, group_size, is_symmetric=is_symmetric).dequantize()
    assert float((rounded - weight).norm() / weight.norm()) <= 1.1 * error


def test_error_of_nf4() -> None:
    """Normal weights come back within a tenth more than the error of NormalFloat 4 in groups of 64."""
    weight = _normal(512, 1024)
    assert float((quantize_nf4(weight).dequantize() - weight).norm() / weight.norm()) <= 1.1 * 0.092


def test_nf4_takes_the_nearest_value() -> None:
    """Each number becomes the nearest of the 16 values times the largest magnitude of its group."""
    weight = _normal(3, 16)
    values = torch.tensor(NF4_VALUES)
    scaled = weight / weight.abs().amax(1, keepdim=True)
    nearest = values[(scaled.unsqueeze(2) - values).abs().argmin(2)]
    assert torch.allclose(nearest * weight.abs().amax(1, keepdim=True), quantize_nf4(weight, 16).dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """A group of zeros comes back as zeros, whatever the rounding."""
    weight = torch.zeros(4, 32)
    for rounded in (
        quantize_linear(weight, 8, scales_dtype=dtype),
        quantize_linear(weight, 4, 16, is_symmetric=False, scales_dtype=dtype),
        quantize_nf4(weight, 16, scales_dtype=dtype),
    ):
        assert torch.equal(weight, rounded.dequantize())


def test_concatenated() -> None:
    """Weights of one layout are one weight, outputs in order; zeros appear where one of them has some."""
    first, second = quantize_linear(_normal(6, 24), 4, 8), quantize_linear(_normal(4, 24), 4, 8, is_symmetric=False)
    both = concatenate([first, second])
    assert both is not None
    assert (10, 24) == both.shape
    assert torch.equal(torch.cat((first.dequantize(), second.dequantize())), both.dequantize())
    alike = concatenate([first, first])
    assert alike is not None
    assert alike.zeros is None


def test_what_does_not_concatenate() -> None:
    """Weights of other bits, groups, tables or orders of inputs are no single weight."""
    kinds = _kinds(_normal(6, 24))
    for kind in ("int8", "nf4", "permuted"):
        assert concatenate([kinds["int4"], kinds[kind]]) is None
    assert concatenate([kinds["int4"], quantize_linear(_normal(6, 24), 4, 12)]) is None


@pytest.mark.parametrize("kind", _kinds(_normal(2, 8)))
def test_product(kind: str) -> None:
    """The product is that with the numbers, in the type of the rows; deterministic, a row's is its own."""
    weight, x, bias = _kinds(_normal(6, 24))[kind], _normal(20, 24), _normal(6)
    assert torch.allclose(x @ weight.dequantize().t() + bias, linear(x, weight, bias), atol=1e-5)
    together = linear(x, weight, bias, deterministic=True)
    assert torch.equal(together[:1], linear(x[:1], weight, bias, deterministic=True))
    assert torch.bfloat16 == linear(x.to(torch.bfloat16), weight).dtype


def test_groups_that_do_not_fit() -> None:
    """Groups have to divide the inputs."""
    with pytest.raises(ValueError, match="group_size must divide the 24 inputs, got 16"):
        quantize_linear(_normal(6, 24), 4, 16)
    with pytest.raises(ValueError, match="group_size must divide the 24 inputs, got 64"):
        quantize_nf4(_normal(6, 24))
