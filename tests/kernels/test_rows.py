"""Operations on rows, norm, gated activation and top-k, agree with formulas in float64, each row by itself."""

import functools

import pytest
import torch
from torch.nn import functional

from weft_kernels.activation import reference as activation
from weft_kernels.activation import triton_kernel
from weft_kernels.norm import reference as norm
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.topk import reference as topk
from weft_kernels.topk.triton_kernel import TILE_COLUMNS, softmax_topk

EPS = 1e-5


def assert_normalises(implementation, place, num_rows, num_columns, *, has_residual, scale=1.0):
    """``implementation`` computes the formula; the residual sum is rounded to the dtype first, as it is stored."""
    x = place.randn(num_rows, num_columns) * scale
    weight = place.randn(num_columns, seed=1)
    residual = place.randn(num_rows, num_columns, seed=2) * scale if has_residual else None
    before = x.clone()
    y, residual_out = implementation(x, weight, EPS, residual)

    total = x if residual is None else x + residual
    wide = total.double()
    expected = wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()
    assert (x.dtype, x.dtype) == (y.dtype, residual_out.dtype)
    assert torch.equal(before, x)
    assert torch.equal(total, residual_out)
    place.assert_close(expected / 4, y.double() / 4)  # entries reach 4 times the unit size that the bound is for


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 33), (5, 64), (2, 1000), (1, 4097)])
def test_the_norm_agrees_with_the_formula(place, num_rows, num_columns, has_residual):
    """Holds for row lengths on both sides of powers of two, with and without a residual."""
    assert_normalises(rms_norm, place, num_rows, num_columns, has_residual=has_residual)


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("num_columns", [1, 33, 256, 1000])
def test_the_reference_of_the_norm_agrees_with_the_formula(place, num_columns, has_residual):
    """The reference satisfies the same check as the kernel."""
    assert_normalises(norm.rms_norm, place, 7, num_columns, has_residual=has_residual)


@pytest.mark.parametrize("implementation", [rms_norm, norm.rms_norm], ids=["kernel", "reference"])
def test_a_row_of_zeros_stays_zeros(place, implementation):
    """``eps`` keeps a row without any signal from becoming NaN."""
    y, _ = implementation(place.randn(2, 33) * 0, place.randn(33), EPS)

    assert 0.0 == y.abs().max().item()


_ACTIVATIONS = {
    f"{name} {module.__name__.rpartition('.')[2]}": getattr(module, name)
    for name in ("silu_mul", "gelu_tanh_mul", "clamped_swiglu")
    for module in (triton_kernel, activation)
}
EACH = pytest.mark.parametrize("implementation", _ACTIVATIONS.values(), ids=_ACTIVATIONS)


def assert_gates(implementation, place, num_rows, num_columns):
    gate_up = place.randn(num_rows, 2 * num_columns)
    gate_up[:, ::3] *= 4  # beyond limits
    before = gate_up.clone()
    out = implementation(gate_up)

    gate, up = gate_up.double().chunk(2, dim=1)
    gated = gate / (1 + torch.exp(-gate))
    match getattr(implementation, "__name__", ""):
        case "gelu_tanh_mul":
            gated = functional.gelu(gate, approximate="tanh")
        case "clamped_swiglu":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            gated = gate * (1.702 * gate).sigmoid()
    assert gate_up.dtype == out.dtype
    assert torch.equal(before, gate_up)
    size = max(4.0, float((gated * up).abs().max()))  # the bound is for entries of unit size
    place.assert_close(gated * up / size, out.double() / size)


@EACH
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 33), (5, 704), (2, 1025)])
def test_the_activation_agrees_with_the_formula(place, implementation, num_rows, num_columns):
    """Holds for lengths within one tile and over the edge of one."""
    assert_gates(implementation, place, num_rows, num_columns)


@EACH
def test_large_gates_neither_overflow_nor_become_nan(place_float32, implementation):
    """A gate of minus 80 gives almost 0 and one of plus 80 gives itself."""
    out = implementation(torch.tensor([[-80.0, 80.0, 1.0, 2.0]], device=place_float32.device))
    largest = 7.0 * 3.0 if implementation.__name__ == "clamped_swiglu" else 80.0 * 2.0
    assert torch.allclose(torch.tensor([[0.0, largest]]), out.cpu(), atol=1e-3 if largest == 21.0 else 1e-6)


tiled = functools.partial(softmax_topk, tile_columns=128)
ALL = pytest.mark.parametrize(
    "implementation", [softmax_topk, tiled, topk.softmax_topk], ids=["one-tile", "many-tiles", "reference"]
)


def assert_finds_the_best(implementation, x, k, *, log=False):
    """Columns equal a stable sort's, best first; the shares equal torch's float64 softmax over the whole row."""
    shares, ids = implementation(x, k, log=log)

    wide = x.double().cpu()
    order = torch.argsort(wide, dim=1, descending=True, stable=True)[:, :k]
    softmax = torch.log_softmax(wide, dim=1) if log else torch.softmax(wide, dim=1)
    assert (torch.float32, torch.int32) == (shares.dtype, ids.dtype)
    assert torch.equal(order.to(torch.int32), ids.cpu())
    assert torch.allclose(softmax.gather(1, order), shares.double().cpu(), rtol=1e-5, atol=1e-6), "a share is wrong"


@ALL
@pytest.mark.parametrize("log", [False, True], ids=["probs", "logprobs"])
@pytest.mark.parametrize(("num_rows", "num_columns", "k"), [(1, 1, 1), (3, 5, 5), (2, 33, 4), (2, 700, 5)])
def test_agrees_with_torch(place, implementation, num_rows, num_columns, k, log):
    """Holds for odd sizes, for k from 1 to the whole row, and for rows that end within a tile."""
    assert_finds_the_best(implementation, place.randn(num_rows, num_columns) * 3, k, log=log)


@ALL
def test_ties_go_to_the_lower_column(place_float32, implementation):
    """Rows of few distinct values come out in the order of a stable sort; both zeros count as they compare."""
    x = (place_float32.randn(4, 200) * 2).round()
    x[x == 0] = 0.0

    assert_finds_the_best(implementation, x, 9)


@ALL
def test_forbidden_columns_come_last(place_float32, implementation):
    """Columns at minus infinity have probability 0, and whole tiles of them disturb nothing."""
    x = torch.full((2, 200), float("-inf"), device=place_float32.device)
    x[0, 150], x[0, 199] = -500.0, -501.0
    x[1, 3] = 1e30

    assert_finds_the_best(implementation, x, 5)


def test_a_vocabulary_beyond_one_tile_takes_two_launches(place_float32):
    """A row of more columns than one program takes agrees with torch at the full tile size."""
    assert_finds_the_best(softmax_topk, place_float32.randn(1, TILE_COLUMNS + 7) * 3, 5, log=True)


def _normalised(implementation):
    return lambda x: implementation(x, torch.linspace(-1, 1, x.shape[1]).to(x), EPS)[0]


def _best(implementation):
    return lambda x: torch.cat([part.float() for part in implementation(x, 3)], 1)


OPERATIONS = {
    **_ACTIVATIONS,
    "norm": _normalised(rms_norm),
    "norm reference": _normalised(norm.rms_norm),
    "top-k": _best(softmax_topk),
    "top-k in tiles": _best(tiled),
    "top-k reference": _best(topk.softmax_topk),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_does_not_depend_on_its_neighbours(place, name):
    """Rows alone, in 16 and in a batch of 17 are equal bit for bit; no rows are no work."""
    if name == "top-k reference" and place.device != "cpu":
        pytest.skip("torch's top k on a GPU takes any of equal values")
    operation, x = OPERATIONS[name], place.randn(17, 202)
    batch = operation(x)
    for size in (1, 16):
        assert torch.equal(batch, torch.cat([operation(part.contiguous()) for part in x.split(size)]))
    assert (0, batch.shape[1]) == tuple(operation(x[:0]).shape)
