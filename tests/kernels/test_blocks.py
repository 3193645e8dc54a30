"""Copies of cache blocks: the kernel and the reference do what plain indexing does."""

import pytest
import torch

from weft_kernels.blocks import reference, triton_kernel
from weft_kernels.blocks.layout import cache_shape, split_layers

IMPLEMENTATIONS = [reference, triton_kernel]
SHAPE = (7, 3, 2, 16, 5, 9)  # 4,320 elements a block: more than one program, and no power of two


def ids(place, *values: int) -> torch.Tensor:
    """Block ids."""
    return torch.tensor(values, dtype=torch.int32, device=place.device)


def check_copy(implementation, place) -> None:
    """What was gathered in one order and scattered elsewhere is what indexing gives."""
    kv = place.randn(*SHAPE)
    before = kv.clone()
    data = implementation.gather_blocks(kv, ids(place, 6, 0, 6))
    assert torch.equal(before[[6, 0, 6]], data), "copied wrongly"
    implementation.scatter_blocks(kv, ids(place, 3, 1, 4), data)
    before[[3, 1, 4]] = data
    assert torch.equal(before, kv), "copied wrongly"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gather_and_scatter(implementation, place):
    """A block may be gathered twice."""
    check_copy(implementation, place)


def test_a_copied_block_has_codes_and_scales():
    """One copy moves both, since the scales of a block lie behind its codes."""
    kv = torch.randint(0, 100, cache_shape(3, 2, 4, 2, 10, torch.int8), dtype=torch.int8)
    assert kv[0].is_contiguous()
    one, two = (torch.tensor([block], dtype=torch.int32) for block in (1, 2))
    reference.scatter_blocks(kv, one, reference.gather_blocks(kv, two))
    for codes, scales in split_layers(kv, 2, 10):
        assert ((3, 2, 4, 2, 10), (3, 2, 4, 2)) == (codes.shape, scales.shape)
        assert torch.equal(codes[2], codes[1])
        assert torch.equal(scales[2], scales[1])
        assert not torch.equal(scales[0], scales[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_blocks_are_no_work(implementation, place_float32):
    """Empty lists leave the cache as it was, and gather nothing."""
    kv = place_float32.randn(*SHAPE)
    before = kv.clone()
    implementation.scatter_blocks(kv, ids(place_float32), kv[:0])
    assert (0, *SHAPE[1:]) == implementation.gather_blocks(kv, ids(place_float32)).shape
    assert torch.equal(before, kv)
