"""The gated activation agrees with its formula in float64, and a row never depends on its neighbours."""

import pytest
import torch
from torch.nn import functional

from weft_kernels.activation import reference, triton_kernel
from weft_kernels.activation.triton_kernel import silu_mul

EACH = pytest.mark.parametrize(
    "implementation",
    [silu_mul, reference.silu_mul, triton_kernel.gelu_tanh_mul, reference.gelu_tanh_mul],
    ids=["kernel", "reference", "gelu-kernel", "gelu-reference"],
)


def _assert_gates(implementation, place, num_rows, num_columns):
    gate_up = place.randn(num_rows, 2 * num_columns)
    before = gate_up.clone()
    out = implementation(gate_up)

    gate, up = gate_up.double().chunk(2, dim=1)
    is_gelu = "gelu" in getattr(implementation, "__name__", "")
    gated = functional.gelu(gate, approximate="tanh") if is_gelu else gate / (1 + torch.exp(-gate))
    assert gate_up.dtype == out.dtype
    assert torch.equal(before, gate_up)
    place.assert_close(gated * up / 4, out.double() / 4)  # entries reach 4 times unit size


@EACH
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (3, 33), (5, 704), (2, 1025)])
def test_agrees_with_the_formula(place, implementation, num_rows, num_columns):
    """Holds for lengths within one tile and over the edge of one."""
    _assert_gates(implementation, place, num_rows, num_columns)


def test_the_check_catches_swapped_halves(place_float32):
    """An implementation that takes the second half for the gate fails the check."""
    with pytest.raises(AssertionError, match="differs by"):
        _assert_gates(lambda x: silu_mul(torch.cat(x.chunk(2, dim=1)[::-1], dim=1)), place_float32, 3, 33)


@EACH
def test_a_row_does_not_depend_on_its_neighbours(place, implementation):
    """Rows alone, in pairs and in a batch of 19 are equal bit for bit, with an odd length too."""
    gate_up = place.randn(19, 2 * 101)
    batch = implementation(gate_up)

    for size in (1, 2, 16):
        assert torch.equal(batch, torch.cat([implementation(part) for part in gate_up.split(size)]))


@EACH
def test_large_gates_neither_overflow_nor_become_nan(place_float32, implementation):
    """A gate of minus 80 gives almost 0 and one of plus 80 gives itself."""
    out = implementation(torch.tensor([[-80.0, 80.0, 1.0, 2.0]], device=place_float32.device))
    assert torch.allclose(torch.tensor([[0.0, 160.0]]), out.cpu(), atol=1e-6)


def test_no_rows_are_no_work(place_float32):
    """A step without rows gives an empty result rather than an empty launch."""
    assert (0, 4) == tuple(silu_mul(place_float32.randn(0, 8)).shape)
