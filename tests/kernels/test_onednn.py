"""Products on a CPU with packed weights: right, of any number of rows, and of their own row alone."""

import os
import subprocess
import sys

import pytest
import torch

from weft_kernels.linear import onednn
from weft_kernels.linear.onednn import Int8Linear, PackedLinear

torch.set_num_threads(1)

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not onednn.is_native(dtype), reason=f"this CPU has no {dtype}"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
#: The last ones have other kernels for a single row than for several.
SHAPES = [(1, 1), (33, 20), (150, 130), (704, 256), (768, 2048)]


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_bitwise_its_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Alone, in chunks of any size and in another order, a row's product with a packed weight is the same."""
    x, weight, bias = _normal(100, shape[1]).to(dtype), _normal(*shape, seed=1).to(dtype), _normal(shape[0]).to(dtype)
    multiply = PackedLinear(weight, bias, deterministic=True)
    together = multiply(x)
    for size in (1, 2, 3, 31, 32, 33, 99):
        assert torch.equal(together, torch.cat([multiply(chunk) for chunk in x.split(size)])), f"chunks of {size}"
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    assert torch.equal(together[order], multiply(x[order]))


def test_rows_are_padded_where_the_library_orders_its_sums_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is bitwise its own even if products of 2 rows and more differ, since all then have the same number."""
    monkeypatch.setattr(onednn, "_is_invariant", lambda shape, dtype: False)
    seen: list[int] = []
    product = PackedLinear._product
    monkeypatch.setattr(PackedLinear, "_product", lambda self, x: (seen.append(len(x)), product(self, x))[1])
    x = _normal(70, 2048)
    multiply = PackedLinear(_normal(768, 2048, seed=1), deterministic=True)
    together = multiply(x)
    assert torch.equal(together, torch.cat([multiply(chunk) for chunk in x.split(7)]))
    assert {onednn.ROWS_PER_TILE} == set(seen)


def test_the_check_of_the_library_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose products of 5 rows differ in one bit is not taken to be invariant."""
    onednn._is_invariant.cache_clear()
    assert onednn._is_invariant((64, 32), torch.float32)
    onednn._is_invariant.cache_clear()
    product = PackedLinear._product

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = product(self, x)
        if len(x) == 5:
            out[3, 7] = torch.nextafter(out[3, 7], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(PackedLinear, "_product", wrong)
    assert not onednn._is_invariant((64, 32), torch.float32)
    onednn._is_invariant.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits_lose_about_a_hundredth(shape: tuple[int, int]) -> None:
    """Relative error of products of normal numbers (Frobenius norm), with outputs and rows of very different sizes."""
    weight = _normal(*shape, seed=1) * torch.logspace(-6, 6, shape[0]).unsqueeze(1)
    x = _normal(40, shape[1]) * torch.logspace(-3, 3, 40).unsqueeze(1)
    bias = _normal(shape[0])
    exact = x.double() @ weight.double().t()
    out = Int8Linear(weight, bias)(x).double() - bias
    errors = (out - exact).norm(dim=0) / exact.norm(dim=0)
    assert errors.median() < (0.013 if onednn._largest_code() == 127 else 0.02)


def test_eight_bits_on_a_cpu_without_vnni() -> None:
    """Sums of pairs of codes, for which such a CPU has 16 bits, fit there: products of positive numbers are exact."""
    code = """
import torch
from weft_kernels.linear.onednn import Int8Linear
torch.set_num_threads(1)
for num_rows in (1, 2, 40):
    print((Int8Linear(torch.ones(70, 256))(torch.ones(num_rows, 256)) - 256).abs().max().item() < 1e-3)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert 3 * "True\n" == run.stdout, run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_an_8_bit_product_is_bitwise_its_own(dtype: torch.dtype) -> None:
    """Sums of integers are exact, and each row has a scale of its own."""
    x, multiply = _normal(70, 300).to(dtype), Int8Linear(_normal(50, 300, seed=1).to(dtype))
    together = multiply(x)
    assert dtype == together.dtype
    for size in (1, 2, 33):
        assert torch.equal(together, torch.cat([multiply(chunk) for chunk in x.split(size)])), f"chunks of {size}"


@pytest.mark.parametrize("multiply", [PackedLinear(torch.ones(4, 8)), Int8Linear(torch.ones(4, 8))])
def test_no_rows_are_no_work(multiply: PackedLinear | Int8Linear) -> None:
    """An empty batch has an empty product."""
    assert (0, 4) == multiply(torch.ones(0, 8)).shape


def test_odd_numbers_in_8_bits() -> None:
    """Zeros stay zeros, in weights and in rows; a row that is not a number harms no other."""
    weight = torch.zeros(3, 8)
    weight[1] = 1.0
    x = torch.tensor([[0.0] * 8, [float("nan")] * 8, [2.0] * 8])
    out = Int8Linear(weight)(x)
    assert [0.0, 0.0, 0.0] == out[0].tolist()
    assert [0.0, 16.0, 0.0] == pytest.approx(out[2].tolist())
