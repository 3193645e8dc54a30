"""Copies of whole KV-cache blocks in one kernel; semantics: ``reference``."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_PROGRAM = 4096


def gather_blocks(kv: Tensor, ids: Tensor) -> Tensor:
    """As ``reference.gather_blocks``; ``kv`` and ``ids`` contiguous.

    Raises:
        ValueError: A shape, dtype or layout is not as documented; the message gives the one got.
    """
    _check("kv", kv)
    _check_ids("ids", ids, kv)
    data = kv.new_empty(ids.shape[0], *kv.shape[1:])
    _copy(kv, data, ids, None)
    return data


def scatter_blocks(kv: Tensor, ids: Tensor, data: Tensor) -> None:
    """As ``reference.scatter_blocks``; all contiguous.

    Raises:
        ValueError: A shape, dtype or layout is not as documented; the message gives the one got.
    """
    _check("kv", kv)
    _check("data", data)
    _check_ids("ids", ids, kv)
    if data.shape != (ids.shape[0], *kv.shape[1:]) or data.dtype != kv.dtype or data.device != kv.device:
        raise ValueError(
            f"data is {data.dtype} {list(data.shape)} on {data.device}; it must be {kv.dtype} "
            f"{[ids.shape[0], *kv.shape[1:]]} on {kv.device}"
        )
    _copy(data, kv, None, ids)


def _copy(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    """Copy row ``source_ids[c]`` of ``source`` to row ``target_ids[c]`` of ``target``; ids None: row ``c``."""
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None  # noqa: S101  # one of the two is not None
    row_size = math.prod(source.shape[1:])
    if not ids.shape[0] or not row_size:
        return
    grid = (ids.shape[0], triton.cdiv(row_size, _ELEMENTS_PER_PROGRAM))
    _copy_rows[grid](
        source,
        target,
        source_ids,
        target_ids,
        ROW_SIZE=row_size,
        ELEMENTS=_ELEMENTS_PER_PROGRAM,
        num_warps=8,
    )


@triton.jit
def _copy_rows(
    source_ptr,
    target_ptr,
    source_id_ptr,
    target_id_ptr,
    ROW_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    index = tl.program_id(0)
    source = index
    target = index
    if source_id_ptr is not None:
        source = tl.load(source_id_ptr + index)
    if target_id_ptr is not None:
        target = tl.load(target_id_ptr + index)
    offset = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    row = tl.load(source_ptr + source.to(tl.int64) * ROW_SIZE + offset, mask=offset < ROW_SIZE)
    tl.store(target_ptr + target.to(tl.int64) * ROW_SIZE + offset, row, mask=offset < ROW_SIZE)


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}; it must be [blocks, ...], "
            "contiguous"
        )


def _check_ids(name: str, ids: Tensor, kv: Tensor) -> None:
    if ids.dtype != torch.int32 or ids.device != kv.device or not ids.is_contiguous():
        raise ValueError(
            f"{name} is {ids.dtype} on {ids.device}, strides {list(ids.stride())}; it must be int32 on {kv.device}, "
            "contiguous"
        )
