"""Random words equal those of the Triton language, and the noise made of them is Gumbel noise to the last bits."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from weft_kernels.sampling.noise import NOISE_SPAN, TOKENS_PER_COUNTER, gumbel, row_noise, token_noise
from weft_kernels.sampling.philox import philox
from weft_kernels.sampling.triton_kernel import _tile_noise

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
POSITIONS = [0, 1, 77, 2**31 - 1]


@triton.jit
def _philox_kernel(seed_ptr, position_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    zero = offs * 0
    words = tl.philox(tl.load(seed_ptr), offs, zero + tl.load(position_ptr), zero, zero)
    for index in tl.static_range(4):
        tl.store(out_ptr + index * BLOCK + offs, words[index].to(tl.int32, bitcast=True))


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, out_ptr, tile, BLOCK: tl.constexpr, PER_COUNTER: tl.constexpr):
    noise = _tile_noise(tl.load(seed_ptr), tl.load(position_ptr), tile, BLOCK, PER_COUNTER)
    tl.store(out_ptr + tl.arange(0, BLOCK), noise)


def _key(seed, position, device):
    return (
        torch.tensor([seed], dtype=torch.int64, device=device),
        torch.tensor([position], dtype=torch.int32, device=device),
    )


def test_philox_gives_the_published_words():
    """Key 0 at counter 0 gives the known answer of the Random123 distribution."""
    words = philox(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))

    assert [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8] == [int(word[0]) for word in words]


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_equals_the_triton_language(place_float32, seed):
    """All four words equal ``tl.philox`` bit for bit, for seeds that use both key words and every sign."""
    for position in POSITIONS:
        out = torch.empty(4, 128, dtype=torch.int32, device=place_float32.device)
        _philox_kernel[(1,)](*_key(seed, position, place_float32.device), out, BLOCK=128)

        expected = philox(np.array([seed]), np.arange(128), np.array([position]))
        assert np.array_equal(np.stack(expected).astype(np.uint32), out.cpu().numpy().view(np.uint32))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_of_the_kernel_is_that_of_the_reference(place_float32, seed):
    """A tile's noise equals the reference's: bit for bit in the interpreter, to 1e-5 where ``log`` is a GPU's."""
    tile, block = 3, 256
    for position in POSITIONS:
        out = torch.empty(block, dtype=torch.float32, device=place_float32.device)
        _noise_kernel[(1,)](
            *_key(seed, position, place_float32.device), out, tile, BLOCK=block, PER_COUNTER=TOKENS_PER_COUNTER
        )

        expected = row_noise(np.array([seed]), np.array([position], np.int32), 2000)[0, tile * block :][:block]
        bound = 0.0 if place_float32.device == "cpu" else 1e-5
        assert np.abs(expected - out.cpu().numpy()).max() <= bound


def test_noise_of_chosen_tokens_is_that_of_the_row():
    """Noise of single tokens equals the row's, so a filter may leave out the rest; its size changes none."""
    seeds, positions = np.array([5, -9]), np.array([3, 4], np.int32)
    row = row_noise(seeds, positions, 1003)
    rows, ids = np.array([0, 0, 1, 1, 1]), np.array([0, 1002, 7, 6, 513])

    assert np.array_equal(row[rows, ids], token_noise(seeds[rows], positions[rows], ids))
    assert np.array_equal(row[:, :37], row_noise(seeds, positions, 37))


def test_noise_of_neighbouring_keys_is_unrelated():
    """Rows of neighbouring seeds and positions correlate no more than chance allows over 4096 tokens."""
    noise = row_noise(np.repeat(np.arange(6), 6), np.tile(np.arange(6, dtype=np.int32), 6), 4096)
    related = np.corrcoef(noise) - np.eye(36)

    assert np.abs(related).max() < 0.08  # five standard deviations


def test_gumbel_is_exact_at_both_tails():
    """Variates lie within 3e-6 of the float64 formula, the rarest words included, and no wider than the span says."""
    edges = np.array([0, 1, 2, 3, 2**26 - 1, 2**26, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    words = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)])
    expected = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2.0**32))
    actual = gumbel(words)

    assert np.abs(expected - actual).max() < 3e-6
    assert actual.max() - actual.min() < NOISE_SPAN


def test_noise_has_the_law_of_gumbel():
    """100,000 variates pass a Kolmogorov-Smirnov test against the Gumbel distribution."""
    stats = pytest.importorskip("scipy.stats")

    for noise in (
        row_noise(np.array([7]), np.array([0], np.int32), 100_000)[0],
        row_noise(np.arange(100_000), np.full(100_000, 9, np.int32), 1)[:, 0],
        row_noise(np.full(100_000, 7), np.arange(100_000, dtype=np.int32), 1)[:, 0],
    ):
        assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
