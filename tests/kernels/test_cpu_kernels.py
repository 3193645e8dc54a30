"""Operations that are compiled for a CPU are those of the reference, and a row's result is bitwise its own."""

import pytest
import torch

from weft_kernels import jit
from weft_kernels.activation import reference as activation
from weft_kernels.blocks.layout import cache_shape, split_layers
from weft_kernels.norm import reference as norm
from weft_kernels.rope_kv import reference as rope_kv

if not jit.is_available():
    pytest.skip("numba is not installed", allow_module_level=True)

from weft_kernels.activation import cpu_kernel as own_activation
from weft_kernels.norm import cpu_kernel as own_norm
from weft_kernels.rope_kv import cpu_kernel as own_rope_kv

torch.set_num_threads(1)

ACTIVATIONS = pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul", "clamped_swiglu"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
#: Of unit size: the last digit of a bfloat16 number, and a few of a float32 one.
BOUNDS = {torch.float32: {"rtol": 4e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 0.008, "atol": 1e-6}}
PAGE = 4


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 16, 100, 768])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm(dtype: torch.dtype, size: int, has_residual: bool) -> None:
    """The norm agrees with the reference, its sum bitwise; rows do not depend on one another."""
    x, weight = _normal(9, size).to(dtype), _normal(size, seed=1).to(dtype)
    residual = _normal(9, size, seed=2).to(dtype) if has_residual else None
    expected, expected_sum = norm.rms_norm(x, weight, 1e-5, residual)
    out, total = own_norm.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(expected_sum, total)
    torch.testing.assert_close(out, expected, **BOUNDS[dtype])
    for row in range(9):
        part = slice(row, row + 1)
        alone, _ = own_norm.rms_norm(x[part], weight, 1e-5, None if residual is None else residual[part])
        assert torch.equal(out[part], alone)


def test_norm_of_odd_rows() -> None:
    """A row of zeros stays zeros, one with a NaN becomes NaN, and neither harms another; no rows are no work."""
    x = torch.ones(3, 20)
    x[0], x[1, 4] = 0, torch.nan
    out, _ = own_norm.rms_norm(x, torch.ones(20), 1e-5)
    assert 0 == out[0].abs().max()
    assert out[1].isnan().all()
    torch.testing.assert_close(out[2], torch.full((20,), 1 / (1 + 1e-5) ** 0.5))
    assert (0, 20) == own_norm.rms_norm(x[:0], torch.ones(20), 1e-5)[0].shape


def test_norm_with_gains_of_another_type() -> None:
    """Gains are read as the type that they have, and no memory beyond them."""
    x, weight = _normal(9, 64), _normal(64, seed=1)
    for rows, gains in ((x, weight.bfloat16()), (x.bfloat16(), weight)):
        expected, _ = norm.rms_norm(rows, gains, 1e-5)
        torch.testing.assert_close(own_norm.rms_norm(rows, gains, 1e-5)[0], expected, **BOUNDS[rows.dtype])


@DTYPES
@ACTIVATIONS
@pytest.mark.parametrize("size", [1, 33, 704])
def test_activation(dtype: torch.dtype, size: int, name: str) -> None:
    """The activation agrees with the reference; rows do not depend on one another."""
    gate_up = (8 * _normal(5, 2 * size)).to(dtype)
    own = getattr(own_activation, name)
    bounds = BOUNDS[dtype] | ({"atol": 1e-5} if name == "gelu_tanh_mul" else {})  # torch's loses digits below 0
    torch.testing.assert_close(own(gate_up), getattr(activation, name)(gate_up), **bounds)
    assert torch.equal(own(gate_up), torch.cat([own(row) for row in gate_up.split(1)]))
    assert (0, size) == own(gate_up[:0]).shape


@ACTIVATIONS
def test_activation_of_odd_numbers(name: str) -> None:
    """Huge, infinite and missing numbers, and zeros of both signs, give what the reference gives."""
    gates = [0.0, -0.0, 1e30, -1e30, 1.9e38, -1.9e38, 88.0, -88.0, -103.0, 1e-40, torch.inf, -torch.inf, torch.nan]
    gate_up = torch.cat((torch.tensor(gates), torch.ones(len(gates)))).view(1, -1)
    expected, out = getattr(activation, name)(gate_up), getattr(own_activation, name)(gate_up)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-36, equal_nan=True)


def _rope(module: object, x: torch.Tensor, heads: tuple[int, int], kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and the cache afterwards, of tokens that lie at other places than their order."""
    num_heads, num_kv_heads = heads
    kv = torch.zeros(cache_shape(8, 2, PAGE, num_kv_heads, x.shape[2], kv_dtype), dtype=kv_dtype)
    layer = split_layers(kv, num_kv_heads, x.shape[2])[1]
    mixed = x.clone()
    q, k, v = mixed.split((num_heads, num_kv_heads, num_kv_heads), 1)
    slots = torch.randperm(8 * PAGE, generator=torch.Generator().manual_seed(7))[: len(x)]
    positions = torch.arange(len(x), dtype=torch.int32) * 3 % 11
    module.rope_and_store(  # type: ignore[attr-defined]
        q, k, v, _normal(11, x.shape[2] // 2, seed=3), _normal(11, x.shape[2] // 2, seed=4), positions, slots,
        layer.kv, kv_scales=layer.scales,
    )  # fmt: skip
    return [q, k, v, kv]


@DTYPES
@pytest.mark.parametrize("heads", [(12, 12), (6, 2), (1, 1)])
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("size", [2, 24, 64])
def test_rope(dtype: torch.dtype, heads: tuple[int, int], has_codes: bool, size: int) -> None:
    """Queries, keys and the cache, of numbers and of codes with their scales, are bitwise those of the reference."""
    x = _normal(9, sum(heads) + heads[1], size).to(dtype)
    x[4, -1] = 0
    kv_dtype = torch.int8 if has_codes else dtype
    for expected, out in zip(_rope(rope_kv, x, heads, kv_dtype), _rope(own_rope_kv, x, heads, kv_dtype), strict=True):
        assert torch.equal(expected, out)


def test_rope_of_what_is_not_a_number() -> None:
    """A key with a NaN gets a scale of NaN, as in the reference, and harms no other."""
    x = _normal(3, 3, 16)
    x[1, 1, 5] = torch.nan
    expected, out = (_rope(module, x, (1, 1), torch.int8)[3] for module in (rope_kv, own_rope_kv))
    scales = [split_layers(kv, 1, 16)[1].scales for kv in (expected, out)]
    torch.testing.assert_close(scales[1], scales[0], rtol=0, atol=0, equal_nan=True)
    assert 1 == scales[1].isnan().sum()
