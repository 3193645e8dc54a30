"""Launch parameters of the attention kernel, by fixed rules without autotuning, and validation of its arguments."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.blocks.layout import check_cache_dtype
from weft_kernels.processors import num_processors

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_KEYS_PER_TILE = 32
_PROMPT_ROWS_PER_TILE = 64
#: Programs of a processor: enough to hide the latency of loads, and not more than its registers hold.
_PROGRAMS_PER_PROCESSOR, _PROMPT_PROGRAMS_PER_PROCESSOR = 4, 2
_MIN_TILES_PER_PART = 4  # a shorter part costs more to merge than it saves
_DETERMINISTIC_KEYS_PER_PART = 512
#: Of parts as long as a program's share of all keys there are fewer than two for each program; of parts of fixed length
#: as many as there is memory for, here 35 MiB of heads of 128.
_STORED_PER_PROGRAM, _DETERMINISTIC_STORED_PER_PROGRAM = 2, 8


@dataclass(frozen=True)
class LaunchPlan:
    """Programs of a launch; nothing here depends on the lengths of a step but for ``rows_per_tile``.

    Attributes:
        rows_per_tile: Tokens times query heads of a group, a power of two, at least 16.
        tokens_per_tile: Whole tokens of a tile.
        keys_per_tile: Keys per iteration of a program, a power of two, at least 16.
        min_keys_per_part: No sequence with fewer keys is cut into parts (split-KV).
        fixed_keys_per_part: Keys of a part, a multiple of ``keys_per_tile``, counted from position 0; a program that
            has all parts of a tile merges them in the same order as a second kernel. 0: parts share a tile's keys
            evenly.
        num_programs: Programs, which take work items in turns.
        num_stored: Parts that there is memory for, for each key-value head.
        dot_dtype: Triton dtype of the operands of products; accumulators are float32.
        num_warps: Warps of a program.
        num_stages: Pipeline stages: tiles of keys and values in flight.
    """

    rows_per_tile: int
    tokens_per_tile: int
    keys_per_tile: int
    min_keys_per_part: int
    fixed_keys_per_part: int
    num_programs: int
    num_stored: int
    dot_dtype: Any
    num_warps: int
    num_stages: int


def plan_launch(q: Tensor, kv_layer: Tensor, max_q_len: int, *, deterministic: bool) -> LaunchPlan:
    """Launch parameters for a model, one set for single tokens and one for prompts.

    If deterministic, a row's order of sums depends on the model only.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_layer.shape[3]
    group_size = num_heads // num_kv_heads
    rows = max(16, triton.next_power_of_2(group_size))
    programs_each, stored_each = _PROGRAMS_PER_PROCESSOR, _STORED_PER_PROGRAM
    if deterministic:
        stored_each = _DETERMINISTIC_STORED_PER_PROGRAM
    elif max_q_len * group_size > rows:
        rows = max(rows, _PROMPT_ROWS_PER_TILE)
        programs_each = _PROMPT_PROGRAMS_PER_PROCESSOR
    num_programs = programs_each * num_processors(q.device)
    is_wide = q.dtype == torch.float32 or head_dim > 128
    return LaunchPlan(
        rows_per_tile=rows,
        tokens_per_tile=rows // group_size,
        keys_per_tile=_KEYS_PER_TILE,
        min_keys_per_part=_MIN_TILES_PER_PART * _KEYS_PER_TILE,
        fixed_keys_per_part=_DETERMINISTIC_KEYS_PER_PART if deterministic else 0,
        num_programs=num_programs,
        num_stored=triton.cdiv(stored_each * num_programs, num_kv_heads),
        dot_dtype=dot_dtype(q),
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )


def dot_dtype(x: Tensor) -> Any:
    """Triton dtype of products of ``x``; the interpreter cannot multiply bfloat16."""
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return tl.float32
    return _DOT_DTYPES[x.dtype]


def check_arguments(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Validate the tensors as documented in ``paged_attention``.

    Raises:
        ValueError: One is invalid; the message names it and gives the shape, dtype or strides got.
    """
    if q.dim() != 3 or q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        raise ValueError(
            f"q has shape {list(q.shape)} and strides {list(q.stride())}; it must be [T, H, D], H and D contiguous"
        )
    if q.dtype not in _DOT_DTYPES:
        raise ValueError(f"q is {q.dtype}; it must be float32, float16 or bfloat16")
    if kv_layer.dim() != 5 or kv_layer.shape[1] != 2 or not kv_layer[0, 0].is_contiguous():
        raise ValueError(
            f"kv_layer has shape {list(kv_layer.shape)} and strides {list(kv_layer.stride())}; "
            "it must be [num_blocks, 2, P, K, D], the last three contiguous"
        )
    check_cache_dtype(q, kv_layer, kv_scales)
    if kv_layer.shape[4] != q.shape[2] or q.shape[1] % kv_layer.shape[3]:
        raise ValueError(
            f"kv_layer is {list(kv_layer.shape)}, q is {list(q.shape)}; they must agree in D, and H must be a multiple "
            "of K"
        )
    num_sequences = ctx_len.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != num_sequences or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables has shape {list(block_tables.shape)}; it must be [{num_sequences}, M], rows contiguous"
        )
    if q_start.shape != (num_sequences + 1,):
        raise ValueError(f"q_start has shape {list(q_start.shape)}; it must be [{num_sequences + 1}]")
    for name, tensor in (("block_tables", block_tables), ("q_start", q_start), ("ctx_len", ctx_len)):
        if tensor.dtype != torch.int32 or tensor.device != q.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; it must be int32 on {q.device}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32 or sinks.device != q.device):
        got = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        raise ValueError(f"sinks is {got}; it must be float32 [{q.shape[1]}] on {q.device}")
