"""Operator dispatch: every operation of the engine runs in plain torch on the CPU and as a Triton kernel on a GPU.

The device of the first tensor decides. The environment variable ``WEFT_KERNELS=triton`` sends every call to the
kernels, which need the interpreter on a CPU (``TRITON_INTERPRET=1``). The first call of an operation imports its
module, so a CPU server never imports the Triton language.

Arguments, shapes, errors and effects of each function are documented in ``reference.py`` of the kernel's folder.
"""

import importlib
import os
from functools import cache
from typing import Any

import torch

from weft_common.errors import InvalidArgumentError

_VARIABLE = "WEFT_KERNELS"
_CHOICES = ("auto", "triton")

_choice = os.environ.get(_VARIABLE) or "auto"
if _choice not in _CHOICES:
    raise InvalidArgumentError(
        f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got '{_choice}'; unset it for 'auto'"
    )
_ARE_KERNELS_FORCED = _choice == "triton"


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """``x @ weight.T + bias``: ``[T, in]`` to ``[T, out]``."""
    return _pick("linear", "linear", x)(x, weight, bias, deterministic=deterministic)


def linear_weight(weight: torch.Tensor) -> torch.Tensor:
    """``weight[out, in]`` in the memory order that ``linear`` reads fastest; itself if it has that order already.

    Plain float32 products of few rows read a weight whose transpose is contiguous in half the time: one row, 17 weights
    with 3.5 million elements in all, 0.75 ms instead of 1.38 ms with one thread of an EPYC. For 16-bit types that order
    brings nothing or is much slower.
    """
    if weight.dtype == torch.float32 and not _is_for_kernels(weight):
        return weight.t().contiguous().t()
    return weight.contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of ``x + residual`` times ``weight``, and the sum itself."""
    result: tuple[torch.Tensor, torch.Tensor] = _pick("norm", "rms_norm", x)(x, weight, eps, residual)
    return result


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu`` of the first half of each row times the second half."""
    return _pick("activation", "silu_mul", gate_up)(gate_up)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    step_cache: dict[str, Any] | None = None,
) -> None:
    """Rotate ``q`` and ``k`` in place, store ``k`` and ``v`` in the KV cache."""
    _pick("rope_kv", "rope_and_store", q)(q, k, v, cos, sin, positions, slot_mapping, kv_layer, step_cache=step_cache)


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    q_start: torch.Tensor,
    ctx_len: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    max_q_len: int,
    max_ctx_len: int,
    deterministic: bool = False,
    step_cache: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens over its blocks."""
    return _pick("attention", "paged_attention", q)(
        q,
        kv_layer,
        block_tables,
        q_start,
        ctx_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        max_q_len=max_q_len,
        max_ctx_len=max_ctx_len,
        deterministic=deterministic,
        step_cache=step_cache,
    )


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
    """Apply repetition, presence and frequency penalties and biases to ``logits`` in place."""
    _pick("sampling", "apply_penalties", logits)(
        logits, row_start, token_ids, output_counts, bias, repetition, presence, frequency
    )


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token per row, drawn with noise that depends only on seed, position and token."""
    return _pick("sampling", "sample", logits)(logits, temperature, top_k, top_p, min_p, seeds, positions)


def softmax_topk(x: torch.Tensor, k: int, *, log: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest (log-)probabilities of each row and their columns."""
    result: tuple[torch.Tensor, torch.Tensor] = _pick("topk", "softmax_topk", x)(x, k, log=log)
    return result


def copy_blocks(kv: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks inside the KV cache: rows of ``pairs`` are (source, destination)."""
    _pick("blocks", "copy_blocks", kv)(kv, pairs)


def gather_blocks(kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Copy the blocks ``ids`` of the KV cache into a new tensor."""
    return _pick("blocks", "gather_blocks", kv)(kv, ids)


def scatter_blocks(kv: torch.Tensor, ids: torch.Tensor, data: torch.Tensor) -> None:
    """Write ``data`` into the blocks ``ids`` of the KV cache."""
    _pick("blocks", "scatter_blocks", kv)(kv, ids, data)


def _pick(folder: str, function: str, x: torch.Tensor) -> Any:
    return _load(folder, function, _is_for_kernels(x))


def _is_for_kernels(x: torch.Tensor) -> bool:
    return _ARE_KERNELS_FORCED or bool(x.is_cuda)


@cache
def _load(folder: str, function: str, is_kernel: bool) -> Any:
    module = importlib.import_module(f"weft_kernels.{folder}.{'triton_kernel' if is_kernel else 'reference'}")
    return getattr(module, function)
