"""The sampler for a GPU: penalties, filters by threshold bisection without a sort, keyed Gumbel-max in two stages.

Three launches draw the tokens of a step. One program per row finds how far below the best logit a token may be, its
`reach`; one program per tile adds the noise and keeps its best token; one program per row compares the tiles. Each
computes what the reference computes, in float32 and in the same order, so both draw the same tokens.
"""

import torch
import triton
import triton.language as tl

from weft_kernels.sampling.noise import NOISE_SPAN, TOKENS_PER_COUNTER
from weft_kernels.sampling.reference import MASS_UNIT, MIN_SHARE, MIN_TEMPERATURE

TILE_TOKENS = 1024
_SEARCH_BLOCK = 4096
_PENALTY_BLOCK = 256
# Columns of one tensor whose addresses depend on the number of rows: their alignment must not trigger a recompilation
# while serving. A program reads one number of each, so alignment brings nothing.
_PER_ROW = [
    *("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr", "peak_ptr", "reach_ptr"),
    *("repetition_ptr", "presence_ptr", "frequency_ptr"),
]

_SPAN = tl.constexpr(NOISE_SPAN)
_MASS = tl.constexpr(float(MASS_UNIT))
_LEAST_SHARE = tl.constexpr(float(MIN_SHARE))
_LEAST_TEMPERATURE = tl.constexpr(float(MIN_TEMPERATURE))


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _penalties_kernel(
    logits_ptr,
    row_start_ptr,
    token_ptr,
    count_ptr,
    bias_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    end = tl.load(row_start_ptr + row + 1)
    repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    for start in range(tl.load(row_start_ptr + row), end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < end
        token = tl.load(token_ptr + offs, mask=mask, other=0)
        count = tl.load(count_ptr + offs, mask=mask, other=-1)
        score = tl.load(row_ptr + token, mask=mask, other=0.0) + tl.load(bias_ptr + offs, mask=mask, other=0.0)
        factor = tl.where(count >= 0, repetition, 1.0)
        score = tl.where(score > 0, tl.math.div_rn(score, factor), score * factor)
        score -= tl.maximum(count, 0).to(tl.float32) * frequency
        score -= tl.where(count > 0, presence, 0.0)
        tl.store(row_ptr + token, score, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _masks_kernel(logits_ptr, row_ptr, mask_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask_ptr + index * num_words + token // 32, mask=token < vocab_size, other=-1)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    row = tl.load(row_ptr + index).to(tl.int64)
    tl.store(logits_ptr + row * vocab_size + token, float("-inf"), mask=is_forbidden & (token < vocab_size))


@triton.jit
def _inverse(temperature):
    return tl.math.div_rn(1.0, tl.maximum(temperature, _LEAST_TEMPERATURE))


@triton.jit
def _within(row_ptr, vocab_size, peak, inverse, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tokens at most ``limit`` below the best; with BY_MASS also sum their mass, in integers."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        gap = (peak - tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf"))) * inverse
        is_inside = gap <= limit
        count += is_inside.to(tl.int32)
        if BY_MASS:
            mass += tl.where(is_inside, tl.exp(-gap) * _MASS, 0.0).to(tl.int64)
    num_tokens = tl.sum(count, axis=0)
    amount = tl.sum(mass, axis=0) if BY_MASS else num_tokens.to(tl.int64)
    return num_tokens, amount


@triton.jit
def _narrow(row_ptr, vocab_size, peak, inverse, reach, share, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest reach that contains ``share``: a number of tokens, or with BY_MASS a share of the mass.

    Bisects the bits of the gap, which order like the gap itself, until a single token lies between the bounds or none
    could. Tokens of equal gap stay together, and every token beyond the result is beyond the least reach.
    """
    num_high, amount_high = _within(row_ptr, vocab_size, peak, inverse, reach, BY_MASS, BLOCK)
    if BY_MASS:
        needed = tl.maximum((amount_high.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)
    else:
        needed = share.to(tl.int64)
    high = reach.to(tl.int32, bitcast=True)
    low = tl.full([], -1, tl.int32)
    num_low = tl.full([], 0, tl.int32)
    while (amount_high > needed) & (num_high - num_low > 1) & (high - low > 1):
        middle = low + (high - low) // 2
        limit = middle.to(tl.float32, bitcast=True)
        num_tokens, amount = _within(row_ptr, vocab_size, peak, inverse, limit, BY_MASS, BLOCK)
        is_enough = amount >= needed
        high = tl.where(is_enough, middle, high)
        num_high = tl.where(is_enough, num_tokens, num_high)
        amount_high = tl.where(is_enough, amount, amount_high)
        low = tl.where(is_enough, low, middle)
        num_low = tl.where(is_enough, num_low, num_tokens)
    return high.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _reach_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peak_ptr,
    reach_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (temperature <= 0.0) | (top_k == 1):
        return  # greedy: the second stage reads neither result
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")))
    peak = tl.max(best, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    inverse = _inverse(temperature)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    reach = tl.minimum(tl.abs(tl.log(tl.maximum(min_p, _LEAST_SHARE))), _SPAN)
    if (top_k > 0) & (top_k < vocab_size):
        reach = _narrow(row_ptr, vocab_size, peak, inverse, reach, top_k, False, BLOCK)
    if top_p < 1.0:
        reach = _narrow(row_ptr, vocab_size, peak, inverse, reach, top_p, True, BLOCK)
    tl.store(peak_ptr + row, peak)
    tl.store(reach_ptr + row, reach)


@triton.jit
def _gumbel(word):
    """Same computation as ``weft_kernels.sampling.noise.gumbel``, where it is explained."""
    is_low = (word >> 31) == 0
    tail = (tl.where(is_low, word, ~word).to(tl.float32) + 0.5) * (2.0**-32)
    exponential = -tl.log(tl.where(is_low, 1.0 - tail, tail))
    series = tail * (1.0 + tail * (0.5 + tail * (1.0 / 3.0 + tail * 0.25)))
    exponential = tl.where(is_low & (tail < 2.0**-6), series, exponential)
    return -tl.log(exponential)


@triton.jit
def _tile_noise(seed, position, tile, BLOCK: tl.constexpr, PER_COUNTER: tl.constexpr):
    """Noise of the tile's tokens: the four words of a counter cover four adjacent tokens."""
    counter = tile * (BLOCK // PER_COUNTER) + tl.arange(0, BLOCK // PER_COUNTER)
    zero = counter * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, counter, zero + position, zero, zero)
    return _gumbel(tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3)))


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    peak_ptr,
    reach_ptr,
    best_ptr,
    id_ptr,
    vocab_size,
    num_tiles,
    BLOCK: tl.constexpr,
    PER_COUNTER: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    score = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf"))
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (temperature > 0.0) & (top_k != 1):
        gap = (tl.load(peak_ptr + row) - score) * _inverse(temperature)
        noise = _tile_noise(tl.load(seed_ptr + row), tl.load(position_ptr + row), tile, BLOCK, PER_COUNTER)
        score = tl.where(gap <= tl.load(reach_ptr + row), noise - gap, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(id_ptr + row * num_tiles + tile, tile * BLOCK + index)


@triton.jit
def _pick_kernel(best_ptr, id_ptr, token_ptr, num_tiles, BLOCK_TILES: tl.constexpr):
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK_TILES)
    best = tl.load(best_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    tl.store(token_ptr + row, tl.load(id_ptr + row * num_tiles + tl.argmax(best, axis=0)))


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
    """Apply bias, repetition, frequency and presence penalties in place; see ``reference.apply_penalties``.

    Raises:
        ValueError: A dtype or shape does not fit, or a tensor is not contiguous. The ids themselves are not checked:
            that would wait for the device.
    """
    num_rows = _check_logits(logits)
    per_row, per_token = (num_rows,), tuple(token_ids.shape)
    _check("row_start", row_start, torch.int32, (num_rows + 1,))
    for name, tensor, dtype, shape in (
        ("token_ids", token_ids, torch.int32, (token_ids.numel(),)),
        ("output_counts", output_counts, torch.int32, per_token),
        ("bias", bias, torch.float32, per_token),
        ("repetition", repetition, torch.float32, per_row),
        ("presence", presence, torch.float32, per_row),
        ("frequency", frequency, torch.float32, per_row),
    ):
        _check(name, tensor, dtype, shape)
    if token_ids.numel():
        _penalties_kernel[(num_rows,)](
            logits,
            row_start,
            token_ids,
            output_counts,
            bias,
            repetition,
            presence,
            frequency,
            logits.shape[1],
            BLOCK=_PENALTY_BLOCK,
        )


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place; see ``reference.apply_masks``."""
    _check_logits(logits)
    num_rows, vocab_size = len(rows), logits.shape[1]
    _check("rows", rows, torch.int32, (num_rows,))
    _check("masks", masks, torch.int32, (num_rows, triton.cdiv(vocab_size, 32)))
    grid = (num_rows, triton.cdiv(vocab_size, TILE_TOKENS))
    _masks_kernel[grid](logits, rows, masks, vocab_size, masks.shape[1], BLOCK=TILE_TOKENS)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row, the same as ``weft_kernels.sampling.reference.sample``; same arguments.

    No synchronisation with the device; launches depend on shapes only, so a CUDA graph can capture them. A compiled
    kernel's ``exp`` and ``log`` differ from a CPU's in the last bit: there, scores that close may be ordered otherwise.

    Returns:
        Token ids, shape ``[S]``, int32, on the device of ``logits``.

    Raises:
        ValueError: A dtype or shape does not fit, or a tensor is not contiguous.
    """
    num_rows = _check_logits(logits)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int32),
    ):
        _check(name, tensor, dtype, (num_rows,))
    vocab_size = logits.shape[1]
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return tokens
    peak, reach = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
    best = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    _reach_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, peak, reach, vocab_size, BLOCK=_SEARCH_BLOCK, num_warps=8
    )
    _draw_kernel[(num_rows, num_tiles)](
        logits,
        temperature,
        top_k,
        seeds,
        positions,
        peak,
        reach,
        best,
        ids,
        vocab_size,
        num_tiles,
        BLOCK=TILE_TOKENS,
        PER_COUNTER=TOKENS_PER_COUNTER,
        enable_fp_fusion=False,  # a fused multiply and add would round once where the reference rounds twice
    )
    _pick_kernel[(num_rows,)](best, ids, tokens, num_tiles, BLOCK_TILES=triton.next_power_of_2(num_tiles))
    return tokens


def _check_logits(logits: torch.Tensor) -> int:
    """Validate the logits; returns their number of rows."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape[1] == 0:
        raise ValueError(
            "logits must be a contiguous float32 [S, V]; "
            f"got {logits.dtype} of shape {tuple(logits.shape)}, strides {logits.stride()}"
        )
    return int(logits.shape[0])


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} of shape {shape}; got {tensor.dtype} {tuple(tensor.shape)}"
        )
