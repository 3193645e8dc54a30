"""Root-mean-square normalisation agrees with its formula in float64, and a row never depends on its neighbours."""

import pytest
import torch

from weft_kernels.norm import reference
from weft_kernels.norm.triton_kernel import rms_norm

EPS = 1e-5


def _assert_normalises(implementation, place, num_rows, num_columns, *, has_residual, scale=1.0):
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
def test_kernel_agrees_with_the_formula(place, num_rows, num_columns, has_residual):
    """Holds for row lengths on both sides of powers of two, with and without a residual."""
    _assert_normalises(rms_norm, place, num_rows, num_columns, has_residual=has_residual)


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("num_columns", [1, 33, 256, 1000])
def test_reference_agrees_with_the_formula(place, num_columns, has_residual):
    """The reference satisfies the same check as the kernel."""
    _assert_normalises(reference.rms_norm, place, 7, num_columns, has_residual=has_residual)


@pytest.mark.parametrize("implementation", [rms_norm, reference.rms_norm], ids=["kernel", "reference"])
def test_a_row_of_zeros_stays_zeros(place, implementation):
    """``eps`` keeps a row without any signal from becoming NaN."""
    y, _ = implementation(place.randn(2, 33) * 0, place.randn(33), EPS)

    assert 0.0 == y.abs().max().item()


def test_the_check_catches_a_kernel_without_eps(place_float32):
    """On inputs as small as ``eps`` a kernel that leaves ``eps`` out fails the check that the true one passes."""
    _assert_normalises(rms_norm, place_float32, 3, 33, has_residual=True, scale=1e-3)
    with pytest.raises(AssertionError, match="differs by"):
        _assert_normalises(
            lambda x, weight, eps, residual: rms_norm(x, weight, 0.0, residual),
            place_float32,
            3,
            33,
            has_residual=True,
            scale=1e-3,
        )


def test_the_check_catches_a_mean_over_the_padded_row(place_float32):
    """A kernel that divides by the padded row's length fails the check."""

    def padded_mean(x, weight, eps, residual):
        y, residual_out = rms_norm(x, weight, eps, residual)
        return y * (64 / 33) ** 0.5, residual_out

    with pytest.raises(AssertionError, match="differs by"):
        _assert_normalises(padded_mean, place_float32, 3, 33, has_residual=False)


@pytest.mark.parametrize("implementation", [rms_norm, reference.rms_norm], ids=["kernel", "reference"])
def test_a_row_does_not_depend_on_its_neighbours(place, implementation):
    """Rows alone, in pairs and in a batch of 19 are equal bit for bit."""
    x, weight = place.randn(19, 100), place.randn(100, seed=1)
    batch, _ = implementation(x, weight, EPS)

    for size in (1, 2, 16):
        alone = torch.cat([implementation(part.contiguous(), weight, EPS)[0] for part in x.split(size)])
        assert torch.equal(batch, alone)


def test_no_rows_are_no_work(place_float32):
    """A step without rows gives an empty result rather than an empty launch."""
    y, _ = rms_norm(place_float32.randn(0, 8), place_float32.randn(8), EPS)

    assert (0, 8) == tuple(y.shape)
