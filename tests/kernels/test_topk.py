"""Softmax with the k best columns agrees with torch, on ties and on rows of several tiles too."""

import functools

import pytest
import torch

from weft_kernels.topk import reference
from weft_kernels.topk.triton_kernel import TILE_COLUMNS, softmax_topk

tiled = functools.partial(softmax_topk, tile_columns=128)
ALL = pytest.mark.parametrize(
    "implementation", [softmax_topk, tiled, reference.softmax_topk], ids=["one-tile", "many-tiles", "reference"]
)


def _assert_finds_the_best(implementation, x, k, *, log=False):
    """Columns equal a stable sort's, best first; the shares equal torch's float64 softmax over the whole row."""
    shares, ids = implementation(x, k, log=log)

    wide = x.double().cpu()
    order = torch.argsort(wide, dim=1, descending=True, stable=True)[:, :k]
    softmax = torch.log_softmax(wide, dim=1) if log else torch.softmax(wide, dim=1)
    assert (torch.float32, torch.int32) == (shares.dtype, ids.dtype)
    assert torch.equal(order.to(torch.int32), ids.cpu())
    assert torch.allclose(softmax.gather(1, order), shares.double().cpu(), rtol=1e-5, atol=1e-6)


@ALL
@pytest.mark.parametrize("log", [False, True], ids=["probs", "logprobs"])
@pytest.mark.parametrize(("num_rows", "num_columns", "k"), [(1, 1, 1), (3, 5, 5), (2, 33, 4), (2, 700, 5)])
def test_agrees_with_torch(place, implementation, num_rows, num_columns, k, log):
    """Holds for odd sizes, for k from 1 to the whole row, and for rows that end within a tile."""
    _assert_finds_the_best(implementation, place.randn(num_rows, num_columns) * 3, k, log=log)


@ALL
def test_ties_go_to_the_lower_column(place_float32, implementation):
    """Rows of few distinct values come out in the order of a stable sort; both zeros count as they compare."""
    x = (place_float32.randn(4, 200) * 2).round()
    x[x == 0] = 0.0

    _assert_finds_the_best(implementation, x, 9)


@ALL
def test_forbidden_columns_come_last(place_float32, implementation):
    """Columns at minus infinity have probability 0, and whole tiles of them disturb nothing."""
    x = torch.full((2, 200), float("-inf"), device=place_float32.device)
    x[0, 150], x[0, 199] = -500.0, -501.0
    x[1, 3] = 1e30

    _assert_finds_the_best(implementation, x, 5)


@ALL
def test_a_row_does_not_depend_on_its_neighbours(place_float32, implementation):
    """Each row alone is equal bit for bit to the row in a batch."""
    x = place_float32.randn(7, 129)
    shares, ids = implementation(x, 3)

    for row in (0, 3, 6):
        alone_shares, alone_ids = implementation(x[row : row + 1], 3)
        assert torch.equal(shares[row : row + 1], alone_shares)
        assert torch.equal(ids[row : row + 1], alone_ids)


def test_the_check_catches_a_softmax_over_one_tile_only(place_float32):
    """An implementation that normalises over the first tile alone fails the check."""
    x = place_float32.randn(2, 200)
    x[:, 0] = 9.0
    _assert_finds_the_best(tiled, x, 1)
    with pytest.raises(AssertionError):
        _assert_finds_the_best(lambda x, k, log: softmax_topk(x[:, :128].contiguous(), k, log=log), x, 1)


def test_a_vocabulary_beyond_one_tile_takes_two_launches(place_float32):
    """A row of more columns than one program takes agrees with torch at the full tile size."""
    _assert_finds_the_best(softmax_topk, place_float32.randn(1, TILE_COLUMNS + 7) * 3, 5, log=True)


def test_no_rows_are_no_work(place_float32):
    """A batch without rows gives empty results rather than an empty launch."""
    shares, ids = softmax_topk(place_float32.randn(0, 8), 2)

    assert ((0, 2), (0, 2)) == (tuple(shares.shape), tuple(ids.shape))
