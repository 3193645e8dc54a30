"""Merge of parts of attention whose keys were walked by several programs, in the Triton language."""

import triton
import triton.language as tl

from weft_kernels.attention.items_triton_kernel import find_sequence, parts_of, rows_of

#: Finite substitute for minus infinity: avoids NaN when the maximum of an empty row is subtracted.
NOTHING = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_sequences", "num_programs"])
def merge_stored(
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    q_start_ptr,
    items_ptr,
    sinks_ptr,
    out_ptr,
    num_sequences,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each tile's parts, first to last, with the arithmetic of a program that merges its own."""
    TOKENS: tl.constexpr = ROWS // GROUP_SIZE
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    dims = tl.arange(0, PADDED_DIM)
    row_of_sums = num_sequences + 1
    num_tiles = tl.load(items_ptr + 2 * row_of_sums + num_sequences) * NUM_KV_HEADS
    for tile in range(tl.program_id(0), num_tiles, num_programs):
        kv_head = tile % NUM_KV_HEADS
        sequence = find_sequence(items_ptr + 2 * row_of_sums, tile // NUM_KV_HEADS, num_sequences)
        begin, q_len, num_parts = parts_of(q_start_ptr, items_ptr, sequence, TOKENS)
        index = tile // NUM_KV_HEADS - tl.load(items_ptr + 2 * row_of_sums + sequence)
        rows, _, row_of_out, is_row = rows_of(
            kv_head, begin, q_len, index * TOKENS, NUM_HEADS, GROUP_SIZE, TOKENS, ROWS
        )
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        stored = tl.load(items_ptr + row_of_sums + sequence) + index * num_parts
        values = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
        row_max = tl.full([ROWS], NOTHING, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        for part in tl.range(num_parts, num_stages=4):  # loads ahead of the sums, which wait for one another
            row_of_part = ((stored + part).to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + rows
            part_max = tl.load(part_max_ptr + row_of_part, mask=is_row, other=NOTHING)
            part_sum = tl.load(part_sum_ptr + row_of_part, mask=is_row, other=0.0)
            part_values = tl.load(
                parts_ptr + row_of_part[:, None] * HEAD_DIM + dims[None, :],
                mask=is_element & (part_sum > 0.0)[:, None],
                other=0.0,
            )
            row_max, shrink, part_shrink = merged(row_max, part_max)
            row_sum = tl.fma(row_sum, shrink, part_sum * part_shrink)
            values = tl.fma(values, shrink[:, None], part_values * part_shrink[:, None])
        tl.store(
            out_ptr + row_of_out[:, None] * HEAD_DIM + dims[None, :],
            averaged(values, row_max, row_sum, sinks_ptr, row_of_out % NUM_HEADS, is_row).to(out_ptr.dtype.element_ty),
            mask=is_element,
        )


@triton.jit
def merged(row_max, part_max):
    """The maximum of both, and what sums up to each must be multiplied by to be relative to it."""
    new_max = tl.maximum(row_max, part_max)
    return new_max, tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)


@triton.jit
def averaged(values, row_max, row_sum, sinks_ptr, head, is_row):
    """Weighted values of all keys by the sum of their weights, to which a sink adds its own."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * LOG2_E
        row_max, shrink, sink_weight = merged(row_max, sink)
        row_sum = tl.fma(row_sum, shrink, sink_weight)
        values *= shrink[:, None]
    return values / tl.where(is_row, row_sum, 1.0)[:, None]
