"""Attention on a CPU that reads keys and values where they lie in the cache, compiled with numba.

Each token and query head is computed by the same instructions in the same order, over tiles of keys counted from
position 0, whatever else is computed. So a row's result depends on its own query, position, keys and values alone, bit
for bit. Query heads of one key-value head share what is loaded of it, and a window reads the blocks that it overlaps.

Source:
    https://arxiv.org/abs/2205.14135 (the running softmax), https://arxiv.org/abs/2309.06180 (pages).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft_kernels import vector_code
from weft_kernels.attention import row_code
from weft_kernels.attention.row_code import (
    GROUP,
    MAX_ROWS,
    TILE,
    begin_row,
    end_row,
    prefetch,
    record_bytes,
    score,
    softmax_step,
    weigh,
)
from weft_kernels.jit import features, jit
from weft_kernels.processors import IS_X86
from weft_kernels.vector_code import DTYPES, INT8, ITEM_BYTES, copy_float32, load_int32, load_int64, store_int64

#: Tokens of a sequence that are walked together, which share what the caches have of its keys.
TOKENS = 32
_FEW_TOKENS = 4
#: Keys whose values are added before the next head's, so that memory is read in order (20 % at 8 heads of 128).
_VALUES = 16
_NUM_GROUPS = TILE // GROUP
_WORK_BYTES = 32
#: Types of ``q``. x86 without F16C has float16 by calls of functions that compiled code does not find.
_FLOATS = tuple(
    dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if dtype != torch.float16 or "f16c" in features() or not IS_X86
)


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    step_cache: dict[str, Any] | None,
) -> Tensor:
    """``reference.paged_attention``, deterministic in any case; same arguments and result.

    They are not validated: see ``is_supported``.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_layer.shape[3]
    cache = {} if step_cache is None else step_cache
    step: _Step | None = cache.get("cpu_attention")
    if step is None:
        step = cache["cpu_attention"] = _step(q_start, ctx_len, num_heads, num_kv_heads, head_dim)
    out = q.new_empty(q.shape)
    kv_bytes, (block_step, half_step) = kv_layer.itemsize, kv_layer.stride()[:2]
    scales = (0, 0, 0)
    if kv_scales is not None:
        scales = (kv_scales.data_ptr(), 4 * kv_scales.stride(0), 4 * kv_scales.stride(1))
    variant = (soft_cap > 0, sinks is not None)
    _kernel(head_dim, num_heads // num_kv_heads, DTYPES[q.dtype], DTYPES[kv_layer.dtype], *variant)(
        step.work.data_ptr(),
        step.work.shape[0],
        out.data_ptr(),
        q.data_ptr(),
        q.stride(0) * q.itemsize,
        kv_layer.data_ptr(),
        block_step * kv_bytes,
        half_step * kv_bytes,
        *scales,
        block_tables.data_ptr(),
        4 * block_tables.stride(0),
        kv_layer.shape[2],
        num_kv_heads,
        float(scale),
        window,
        float(soft_cap),
        0 if sinks is None else sinks.data_ptr(),
        step.scratch.data_ptr(),
    )
    return out


def is_supported(q: Tensor, kv_layer: Tensor, block_tables: Tensor) -> bool:
    """Whether ``paged_attention`` takes tensors of these dtypes and layouts."""
    return (
        q.dtype in _FLOATS
        and kv_layer.dtype in (q.dtype, torch.int8)
        and kv_layer.shape[2] % GROUP == 0
        and q.stride()[1:] == (q.shape[2], 1)
        and block_tables.dtype == torch.int32
        and block_tables.stride(1) == 1
    )


def prepare(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    has_cap: bool = False,
    has_sinks: bool = False,
) -> None:
    """Compile the kernel for models of this shape, which takes a second, or load it from the disk."""
    if dtype in _FLOATS and kv_dtype in (dtype, torch.int8):
        kernel = _kernel(head_dim, num_heads // num_kv_heads, DTYPES[dtype], DTYPES[kv_dtype], has_cap, has_sinks)
        kernel(*[0] * 15, 1.0, 0, 0.0, 0, 0)


class _Step(NamedTuple):
    """What all layers of a step share.

    Attributes:
        work: For each sequence with new tokens the first row of ``q``, the row after its last, its context and its row
            of ``block_tables``; shape ``[n, 4]``, int64.
        scratch: Memory of the kernel, uint8.
    """

    work: Tensor
    scratch: Tensor


def _step(q_start: Tensor, ctx_len: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> _Step:
    starts, work = q_start.numpy(), np.empty((len(ctx_len), 4), np.int64)
    work[:, 0], work[:, 1], work[:, 2], work[:, 3] = starts[:-1], starts[1:], ctx_len.numpy(), np.arange(len(work))
    longest = int((work[:, 1] - work[:, 0]).max(initial=0))
    num_rows = max(min(_FEW_TOKENS, longest) * num_heads, min(TOKENS, longest) * num_heads // num_kv_heads)
    num_bytes = 8 * _NUM_GROUPS + 8 * TILE * num_kv_heads + num_rows * record_bytes(head_dim)
    return _Step(torch.from_numpy(work), torch.empty(num_bytes, dtype=torch.uint8))


@cache
def _kernel(  # noqa: PLR0915  # one walk, whose parts must not be calls
    head_dim: int, group_size: int, q_dtype: int, kv_dtype: int, has_cap: bool, has_sinks: bool
) -> Callable[..., None]:
    """The kernel for models of this shape; addresses and distances in bytes."""
    D, Q, KV, CODES = head_dim, q_dtype, kv_dtype, int(kv_dtype == INT8)
    CAP, SINKS = int(has_cap), int(has_sinks)
    ROWS = min(group_size, MAX_ROWS)
    CHUNKS, REST = divmod(group_size, ROWS)
    LAST = max(1, REST)  # rows of a last, shorter chunk; a kernel of 0 rows cannot be compiled
    SHARING = max(1, MAX_ROWS // group_size)  # tokens whose rows share a key, where heads are few in a group
    SHARED_ROWS = ROWS * SHARING
    RECORD = record_bytes(head_dim)
    Q_BYTES, KV_BYTES = head_dim * ITEM_BYTES[q_dtype], head_dim * ITEM_BYTES[kv_dtype]

    def attend(  # noqa: PLR0915
        work, num_items, out, q, q_step, kv, block_step, half_step, scales, scale_block_step, scale_half_step,
        tables, table_step, block_size, num_kv_heads, scale, window, cap, sinks, scratch,
    ):  # fmt: skip
        num_heads = num_kv_heads * group_size
        key_step = num_kv_heads * KV_BYTES
        tile_scales = scratch + 8 * _NUM_GROUPS
        records = tile_scales + 8 * TILE * num_kv_heads
        for item in range(num_items):
            begin = load_int64(work + item * _WORK_BYTES)
            end = load_int64(work + item * _WORK_BYTES + 8)
            ctx_len = load_int64(work + item * _WORK_BYTES + 16)
            table = tables + load_int64(work + item * _WORK_BYTES + 24) * table_step
            # of few tokens all heads go together, as memory has them; of many one head, so that caches keep its keys
            num_together = num_kv_heads if end - begin <= _FEW_TOKENS else 1
            num_chunks = num_kv_heads // num_together
            num_rows = num_together * group_size  # of a token
            for chunk in range((end - begin + TOKENS - 1) // TOKENS * num_chunks):
                first, head_from = begin + chunk // num_chunks * TOKENS, chunk % num_chunks
                head_to = head_from + num_together
                num_tokens = min(TOKENS, end - first)
                position = ctx_len - (end - first)  # of the first of these tokens
                for row in range(num_tokens * num_rows):
                    head = head_from * group_size + row % num_rows
                    query = q + (first + row // num_rows) * q_step + head * Q_BYTES
                    begin_row(records + row * RECORD, query, scale, sinks + 4 * head, D, Q, SINKS)
                lowest = max(0, position + 1 - window) if window else 0
                for start in range(lowest // TILE * TILE, position + num_tokens, TILE):
                    num_keys = min(TILE, position + num_tokens - start)
                    first_group = max(0, lowest - start) // GROUP
                    for group in range(first_group, (num_keys + GROUP - 1) // GROUP):
                        key = start + group * GROUP
                        block, offset = load_int32(table + 4 * (key // block_size)), key % block_size
                        store_int64(scratch + 8 * group, kv + block * block_step + offset * key_step)
                        if CODES:
                            at = scales + block * scale_block_step + 4 * offset * num_kv_heads
                            for each in range(GROUP):
                                for head in range(head_from, head_to):
                                    place = tile_scales + head * (8 * TILE) + 4 * (group * GROUP + each)
                                    copy_float32(at + 4 * (each * num_kv_heads + head), place)
                                    copy_float32(
                                        at + 4 * (each * num_kv_heads + head) + scale_half_step, place + 4 * TILE
                                    )
                    for group in range(first_group, (num_keys + GROUP - 1) // GROUP):
                        for head in range(head_from, head_to):
                            keys = load_int64(scratch + 8 * group) + head * KV_BYTES
                            prefetch(keys + half_step, key_step, D, KV)  # 25 % where memory is the limit
                            token = 0
                            while token < num_tokens:
                                own = position + token - start
                                record = records + (token * num_rows + (head - head_from) * group_size) * RECORD
                                num_seen = SHARING if num_together == 1 and token + SHARING <= num_tokens else 1
                                token += num_seen
                                if group * GROUP >= own + num_seen:
                                    continue
                                if window and group * GROUP + GROUP <= own + 1 - window:
                                    continue
                                if num_seen > 1:
                                    score(record, group, keys, key_step, SHARED_ROWS, D, KV)
                                    continue
                                for _ in range(CHUNKS):
                                    score(record, group, keys, key_step, ROWS, D, KV)
                                    record += ROWS * RECORD
                                if REST:
                                    score(record, group, keys, key_step, LAST, D, KV)
                    for row in range(num_tokens * num_rows):
                        own = position + row // num_rows - start
                        low, high = max(0, own + 1 - window) if window else 0, min(TILE, own + 1)
                        if low < high:
                            head_scales = tile_scales + (head_from + row % num_rows // group_size) * (8 * TILE)
                            softmax_step(records + row * RECORD, low, high, cap, head_scales, D, CAP, CODES)
                    for value in range(first_group * GROUP // _VALUES * _VALUES, num_keys, _VALUES):
                        for head in range(head_from, head_to):
                            offset = half_step + head * KV_BYTES
                            token = 0
                            while token < num_tokens:
                                own = position + token - start
                                record = records + (token * num_rows + (head - head_from) * group_size) * RECORD
                                low = max(value, own + 1 - window) if window else value
                                high = min(value + _VALUES, own + 1)
                                token += 1
                                if num_together == 1 and token - 1 + SHARING <= num_tokens and SHARING > 1:
                                    low_of_last = max(value, own + SHARING - window) if window else value
                                    if low_of_last == value and high == value + _VALUES:  # all of them see all values
                                        weigh(record, scratch, offset, key_step, low, high, SHARED_ROWS, D, KV)
                                        token += SHARING - 1
                                        continue
                                if low >= high:
                                    continue
                                for _ in range(CHUNKS):
                                    weigh(record, scratch, offset, key_step, low, high, ROWS, D, KV)
                                    record += ROWS * RECORD
                                if REST:
                                    weigh(record, scratch, offset, key_step, low, high, LAST, D, KV)
                for row in range(num_tokens * num_rows):
                    head = head_from * group_size + row % num_rows
                    end_row(
                        records + row * RECORD, out + ((first + row // num_rows) * num_heads + head) * Q_BYTES, D, Q
                    )

    return jit(attend, vector_code, row_code)
