"""Matrix products whose rows do not depend on the batch."""

import pytest
import torch

from weft_kernels.linear import reference, triton_kernel

IMPLEMENTATIONS = [reference, triton_kernel]


def check(implementation, place) -> None:
    """The product of odd sizes is right; entries are of about unit size."""
    x, weight, bias = place.randn(35, 130), place.randn(150, 130, seed=1) / 11, place.randn(150, seed=2)
    expected = x.double() @ weight.double().t() + bias.double()
    place.assert_close(expected / 4, implementation.linear(x, weight, bias, deterministic=True) / 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_a_matrix_product(implementation, place):
    """Sizes that are no multiple of a tile, with a bias."""
    check(implementation, place)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_bitwise_its_own(implementation, has_bias, place):
    """Alone, in part of the batch and in another order, a row's product is the same."""
    x, weight = place.randn(35, 96), place.randn(80, 96, seed=1)
    bias = place.randn(80, seed=2) if has_bias else None
    together = implementation.linear(x, weight, bias, deterministic=True)
    for rows in (slice(0, 1), slice(3, 10), slice(16, 32), slice(34, 35)):
        assert torch.equal(together[rows], implementation.linear(x[rows], weight, bias, deterministic=True)), rows
    order = torch.randperm(35, generator=torch.Generator().manual_seed(3)).to(place.device)
    assert torch.equal(together[order], implementation.linear(x[order], weight, bias, deterministic=True))


def test_a_row_of_the_reference_in_bfloat16_is_bitwise_its_own():
    """The same in the dtype that models are served in."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 256, generator=generator).bfloat16() for rows in (35, 704))
    together = reference.linear(x, weight, deterministic=True)
    for size in (1, 7, 16):
        chunks = [reference.linear(chunk, weight, deterministic=True) for chunk in x.split(size)]
        assert torch.equal(together, torch.cat(chunks)), f"chunks of {size}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_are_no_work(implementation, place_float32):
    """An empty batch has an empty product."""
    out = implementation.linear(place_float32.randn(0, 8), place_float32.randn(4, 8), deterministic=True)
    assert (0, 4) == out.shape
