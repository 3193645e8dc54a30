"""Philox-4x32-10 in numpy, bitwise equal to the Triton language's for the same key and counter.

Philox is a pure function from (key, counter) to four words, so noise needs no generator state: the seed
of a request and a position determine it, on any device and in any batch.

Source:
    J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW_WORD, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox(
    seed: npt.NDArray[np.int64], counter_0: npt.NDArray[np.integer], counter_1: npt.NDArray[np.integer]
) -> tuple[Words, Words, Words, Words]:
    """Returns the four words at counter ``(counter_0, counter_1, 0, 0)`` under the 64-bit key ``seed``.

    Args:
        seed: Key; its low 32 bits are the first key word, its high 32 bits the second. Any shape.
        counter_0: First counter word, 0 to 2**32 - 1. Broadcast with the others; an array that is small before
            broadcasting is multiplied small, which saves the first rounds.
        counter_1: Second counter word, likewise.

    Returns:
        Four arrays of the broadcast shape, each word between 0 and 2**32 - 1 and held in a uint64.
    """
    key = seed.astype(np.int64).view(np.uint64)
    key_0, key_1 = key & _LOW_WORD, key >> _WORD_BITS
    c0, c1 = counter_0.astype(np.uint64), counter_1.astype(np.uint64)
    c2 = c3 = np.zeros((1,) * key.ndim, np.uint64)
    for _ in range(NUM_ROUNDS):
        # c1 and c3 keep the high halves of their products: only c0 and c2 are multiplied, and those are cut to 32 bits.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> _WORD_BITS) ^ c1 ^ key_0) & _LOW_WORD
        c2 = ((product_0 >> _WORD_BITS) ^ c3 ^ key_1) & _LOW_WORD
        c1, c3 = product_1, product_0
        key_0, key_1 = (key_0 + _KEY_STEP_0) & _LOW_WORD, (key_1 + _KEY_STEP_1) & _LOW_WORD
    return c0, c1 & _LOW_WORD, c2, c3 & _LOW_WORD
