"""Gumbel noise keyed by (seed, position, token id): the sampler's only source of randomness.

Token ``t`` uses word ``t % 4`` of the Philox counter ``(t // 4, position, 0, 0)``, so one evaluation covers four
tokens. The Triton kernel follows the same steps in the same order, hence equal noise bit for bit under its interpreter.
"""

import numpy as np
import numpy.typing as npt

from weft_kernels.sampling.philox import Words, philox

TOKENS_PER_COUNTER = 4
NOISE_SPAN = 27.0
"""Noise lies in [-3.14, 22.88]: a token whose scaled logit is this far below the best one can never be drawn."""

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_THIRD = np.float32(1.0 / 3.0)
_QUARTER = np.float32(0.25)
_WORD_TO_UNIT = np.float32(2.0**-32)
_SERIES_LIMIT = np.float32(2.0**-6)


def gumbel(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Convert uniform 32-bit words to Gumbel variates ``-log(-log(u))`` with ``u = 1 - (word + 0.5) / 2**32``.

    A float32 close to 1 holds 24 bits only, which would cut the upper tail, where the winning tokens are, at 16.6. The
    smaller of ``u`` and ``1 - u`` is kept instead, at full precision, and near ``u = 1`` ``-log(u)`` is a series.

    Args:
        words: Any shape. Not modified.

    Returns:
        Finite variates of the same shape, between -3.14 and 22.88.
    """
    is_low = words < np.uint32(1 << 31)
    tail = (np.where(is_low, words, ~words).astype(np.float32) + _HALF) * _WORD_TO_UNIT
    exponential = -np.log(np.where(is_low, _ONE - tail, tail))
    series = tail * (_ONE + tail * (_HALF + tail * (_THIRD + tail * _QUARTER)))
    exponential = np.where(is_low & (tail < _SERIES_LIMIT), series, exponential)
    return -np.log(exponential)


def row_words(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], vocab_size: int
) -> npt.NDArray[np.uint32]:
    """The random word of every token of every row, shape ``[num_rows, vocab_size]``, the input of ``gumbel``.

    Args:
        seeds: Shape ``[num_rows]``.
        positions: Absolute position of the token to draw, shape ``[num_rows]``.
        vocab_size: Number of tokens.
    """
    num_counters = -(-vocab_size // TOKENS_PER_COUNTER)
    words = np.empty((len(seeds), num_counters, TOKENS_PER_COUNTER), np.uint32)
    _store(philox(seeds[:, None], np.arange(num_counters)[None, :], positions[:, None]), words)
    return words.reshape(len(seeds), -1)[:, :vocab_size]


def row_noise(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], vocab_size: int
) -> npt.NDArray[np.float32]:
    """The noise of every token of every row, shape ``[num_rows, vocab_size]``; arguments: see ``row_words``."""
    return gumbel(row_words(seeds, positions, vocab_size))


def token_noise(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], token_ids: npt.NDArray[np.integer]
) -> npt.NDArray[np.float32]:
    """The noise of selected tokens, equal to that of ``row_noise``; arguments and result are ``[n]``."""
    words = np.empty((len(seeds), TOKENS_PER_COUNTER), np.uint32)
    _store(philox(seeds, token_ids // TOKENS_PER_COUNTER, positions), words)
    return gumbel(np.take_along_axis(words, token_ids[:, None] % TOKENS_PER_COUNTER, axis=1)[:, 0])


def _store(four_words: tuple[Words, Words, Words, Words], out: npt.NDArray[np.uint32]) -> None:
    for index, word in enumerate(four_words):
        out[..., index] = word
