"""The sampler in numpy: the CPU implementation, and the kernel's test oracle.

numpy rather than torch, because its ``exp`` and ``log`` are what the Triton language's interpreter computes with, its
``argmax`` promises the first of equals, and its sort of float32 is several times quicker than torch's on one thread.
"""

import numpy as np
import numpy.typing as npt
import torch

from weft_kernels.sampling.noise import NOISE_SPAN, gumbel, row_words, token_noise

MIN_TEMPERATURE = np.float32(1e-30)  # still greedy in effect, and its inverse is finite
MIN_SHARE = np.float32(1e-30)  # of the best token's probability; far beyond `NOISE_SPAN`, and its logarithm is finite
MASS_UNIT = np.float32(2.0**40)
_VALUE_LIMIT = np.float32(2.0**32 * 1.001)  # the last digits leave room for the rounding of logarithms
_ONE = np.float32(1.0)
_FORBIDDEN = np.float32(-np.inf)
_CHUNK_TOKENS = 1 << 16  # rows are drawn in groups whose dozen arrays stay in the second-level cache
_SPARSE_SHARE = 8  # noise of single tokens costs more a token than noise of whole rows; by far less than this factor

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def apply_penalties(
    logits: torch.Tensor,
    row_start: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    bias: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Apply bias, repetition, frequency and presence penalties in place, in this order.

    Row ``s`` lists its tokens at ``row_start[s]:row_start[s + 1]``; other tokens keep their logits.

    Args:
        logits: Shape ``[S, V]``, float32. Modified.
        row_start: Shape ``[S + 1]``, int32, ascending from 0.
        token_ids: Shape ``[L]``, int32; every token at most once in a row.
        output_counts: Shape ``[L]``, int32: how often the token was generated; 0 where it stands in the prompt only, -1
            where it stands in neither and has a bias only.
        bias: Added first, shape ``[L]``, float32; minus infinity forbids the token.
        repetition: Shape ``[S]``, float32: a positive logit is divided by it, any other multiplied, if the token
            stands in the prompt or the output. 1 is off.
        presence: Shape ``[S]``, float32: subtracted once if the token was generated. 0 is off.
        frequency: Shape ``[S]``, float32: subtracted as often as the token was generated. 0 is off.
    """
    if token_ids.numel() == 0:
        return
    scores, ids, counts = logits.numpy(), token_ids.numpy(), output_counts.numpy()
    rows = np.repeat(np.arange(scores.shape[0]), np.diff(row_start.numpy()))
    picked = scores[rows, ids] + bias.numpy()
    factor = np.where(counts >= 0, repetition.numpy()[rows], np.float32(1.0))
    picked = np.where(picked > 0, picked / factor, picked * factor)
    generated = np.maximum(counts, 0).astype(np.float32)
    picked = picked - generated * frequency.numpy()[rows]
    picked = picked - np.where(counts > 0, presence.numpy()[rows], np.float32(0.0))
    scores[rows, ids] = picked


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place.

    Args:
        logits: Shape ``[S, V]``, float32. Modified.
        rows: Shape ``[M]``, int32: the rows that ``masks`` are for, each at most once.
        masks: Shape ``[M, ceil(V / 32)]``, int32: bit ``t % 32`` of word ``t // 32`` is that of token ``t``.
    """
    scores = logits.numpy()
    # A row of 131,072 tokens takes 0.1 ms where few are allowed, 0.25 where most are (AMD EPYC).
    for row, words in zip(rows.tolist(), ~masks.numpy(), strict=True):
        is_forbidden = np.unpackbits(words.view(np.uint8), count=scores.shape[1], bitorder="little").view(np.bool_)
        np.copyto(scores[row], _FORBIDDEN, where=is_forbidden)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row by the Gumbel-max trick; a row's token depends on that row's arguments only.

    The noise is keyed by (seed, position, token id), so a row draws the same token in every batch, and two rows of
    equal seed and position but different logits draw coupled tokens. Filters act on the scaled logits: min-p, then
    top-k among what is left, then top-p among what is left. All tokens that tie with the last one kept are kept. The
    mass that top-p compares is counted in integers (2**40 for the best token), so that no order of summation, be it
    after a sort or between thresholds, changes which tokens are kept.

    Args:
        logits: Shape ``[S, V]``, float32, contiguous; minus infinity forbids a token. Not modified.
        temperature: Shape ``[S]``, float32, finite; 0 takes the best token, the lowest id on ties, whatever the
            filters.
        top_k: Shape ``[S]``, int32: how many of the best tokens to keep; 0 keeps all, 1 is the same as temperature 0.
        top_p: Shape ``[S]``, float32: share of the mass to keep, in (0, 1]; 1 keeps all.
        min_p: Shape ``[S]``, float32: least probability to keep, relative to the best token's, in [0, 1]; 0 keeps all.
        seeds: Shape ``[S]``, int64, any value.
        positions: Absolute position of the token to draw, shape ``[S]``, int32, not negative.

    Returns:
        Token ids, shape ``[S]``, int32. A row that forbids every token gives 0.
    """
    scores = logits.numpy()
    tokens = scores.argmax(axis=1)
    heat, keep = temperature.numpy(), top_k.numpy()
    drawn = np.flatnonzero((heat > 0) & (keep != 1))
    rows_per_chunk = max(1, _CHUNK_TOKENS // scores.shape[1])
    for start in range(0, drawn.size, rows_per_chunk):
        rows = drawn[start : start + rows_per_chunk]
        gap = _gap(scores[rows], heat[rows])
        reach = _reach(gap, keep[rows], top_p.numpy()[rows], min_p.numpy()[rows])
        tokens[rows] = _draw(gap, reach, seeds.numpy()[rows], positions.numpy()[rows])
    return torch.from_numpy(tokens.astype(np.int32))


def _gap(scores: Floats, temperature: Floats) -> Floats:
    """Distance of each scaled logit below the best of its row: 0 for the best, inf for forbidden tokens."""
    peak = scores.max(axis=1, keepdims=True)
    peak[np.isneginf(peak)] = 0.0
    inverse = _ONE / np.maximum(temperature, MIN_TEMPERATURE)[:, None]
    with np.errstate(over="ignore"):  # a tiny temperature moves other tokens to infinity, which excludes them
        gap: Floats = (peak - scores) * inverse
    return gap


def _reach(gap: Floats, top_k: Ints, top_p: Floats, min_p: Floats) -> Floats:
    """The largest gap that each row keeps; sorts only rows with top-k or top-p."""
    vocab_size = gap.shape[1]
    reach = np.minimum(np.float32(NOISE_SPAN), np.abs(np.log(np.maximum(min_p, MIN_SHARE))))
    limits_count, limits_mass = (top_k > 0) & (top_k < vocab_size), top_p < 1
    asking = np.flatnonzero(limits_count | limits_mass)
    if not asking.size:
        return reach
    ordered = np.sort(gap[asking], axis=1)
    kept = np.where(limits_count, top_k, vocab_size)[asking]
    edge = np.minimum(reach[asking], ordered[np.arange(asking.size), kept - 1])
    if limits_mass.any():
        edge = np.minimum(edge, _mass_edge(ordered, edge, top_p[asking]))
    reach[asking] = edge
    return reach


def _mass_edge(ordered: Floats, edge: Floats, top_p: Floats) -> Floats:
    """The gap at which the tokens of each row, best first and up to ``edge``, first reach the share ``top_p``."""
    is_inside = ordered <= edge[:, None]
    width = max(1, int(is_inside.sum(axis=1).max()))
    weight = np.where(is_inside[:, :width], np.exp(-ordered[:, :width]) * MASS_UNIT, np.float32(0.0))
    mass = np.cumsum(weight.astype(np.int64), axis=1)
    part = np.maximum((mass[:, -1].astype(np.float64) * top_p).astype(np.int64), 1)
    needed = np.where(top_p < 1, part, mass[:, -1])  # rounding up may exceed the total
    column = (mass >= needed[:, None]).argmax(axis=1)
    found: Floats = ordered[np.arange(len(ordered)), column]
    return found


def _draw(gap: Floats, reach: Floats, seeds: npt.NDArray[np.int64], positions: Ints) -> npt.NDArray[np.intp]:
    """The token with the largest noise minus gap, among those within reach."""
    alive = gap <= reach[:, None]
    if np.count_nonzero(alive) * _SPARSE_SHARE > alive.size:
        words = row_words(seeds, positions, gap.shape[1])
        rows, ids = np.nonzero(_may_win(gap, alive, words))
        noise = gumbel(words[rows, ids])
    else:
        rows, ids = np.nonzero(alive)
        noise = token_noise(seeds[rows], positions[rows], ids)
    score = np.full_like(gap, -np.inf)
    score[rows, ids] = noise - gap[rows, ids]
    best: npt.NDArray[np.intp] = score.argmax(axis=1)
    return best


def _may_win(gap: Floats, alive: npt.NDArray[np.bool_], words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Candidates for the maximum, which alone need logarithms: a handful per row, including the winner.

    The noise of a word ``w`` is at most ``-log((w + 1) / 2**32)``, and close to it for the small words that win. So
    the smallest ``(w + 1) * exp(gap)`` is a good token, and any token that beats its score has a value below a limit.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        value = np.where(alive, (words.astype(np.float32) + _ONE) * np.exp(gap), np.float32(np.inf))
        rows, good = np.arange(len(gap)), value.argmin(axis=1)
        score = gumbel(words[rows, good]) - gap[rows, good]
        limit = np.exp(-score) * _VALUE_LIMIT
    may_win: npt.NDArray[np.bool_] = value <= limit[:, None]
    return may_win & alive
