"""Operator dispatch: every operation of the engine runs in torch or compiled on a CPU, as a Triton kernel on a GPU.

The device of the first tensor decides. The environment variable ``WEFT_KERNELS=triton`` sends every call to the
kernels, which need the interpreter on a CPU (``TRITON_INTERPRET=1``). The first call of an operation imports its
module, so a CPU server never imports the Triton language; importing this module imports no torch. Matrix products are
chosen when a model is loaded (``weft_kernels.linear.products``).

Arguments, shapes, errors and effects of each function are documented in ``reference.py`` of the kernel's folder.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from weft.base.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from weft_kernels.blocks.layout import KVLayer

_VARIABLE = "WEFT_KERNELS"
_CHOICES = ("auto", "triton")

_choice = os.environ.get(_VARIABLE) or "auto"
if _choice not in _CHOICES:
    raise InvalidArgumentError(
        f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got '{_choice}'; unset it for 'auto'"
    )
#: Every operation is a Triton kernel.
ARE_KERNELS_FORCED = _choice == "triton"

#: ``x @ weight.T + bias``: ``[T, in]``, not modified, to ``[T, out]``, newly allocated.
Linear: TypeAlias = Callable[["Tensor"], "Tensor"]


def rms_norm(x: "Tensor", weight: "Tensor", eps: float, residual: "Tensor | None" = None) -> "tuple[Tensor, Tensor]":
    """RMS norm of ``x + residual`` times ``weight``, and the sum itself."""
    result: tuple[Tensor, Tensor] = _pick_compiled("norm", "rms_norm", x)(x, weight, eps, residual)
    return result


def silu_mul(gate_up: "Tensor") -> "Tensor":
    """``silu`` of the first half of each row times the second half."""
    return _pick_compiled("activation", "silu_mul", gate_up)(gate_up)


def gelu_tanh_mul(gate_up: "Tensor") -> "Tensor":
    """``gelu``, by its approximation with tanh, of the first half of each row times the second half."""
    return _pick_compiled("activation", "gelu_tanh_mul", gate_up)(gate_up)


def clamped_swiglu(gate_up: "Tensor", alpha: float, limit: float) -> "Tensor":
    """``gate * sigmoid(alpha * gate) * (up + 1)``, the halves of each row clamped by ``limit``."""
    return _pick_compiled("activation", "clamped_swiglu", gate_up)(gate_up, alpha, limit)


def route(logits: "Tensor", num_chosen: int, *, is_normalized: bool) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Shares of the experts that rows choose, rows by expert, places of the choices, first places of experts."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _pick_compiled("experts", "route", logits)(
        logits, num_chosen, is_normalized=is_normalized
    )
    return result


def combine_experts(y: "Tensor", places: "Tensor", shares: "Tensor") -> "Tensor":
    """Sum of each row's choices, which are at ``places`` of ``y``, times their shares."""
    result: Tensor = _pick_compiled("experts", "combine", y)(y, places, shares)
    return result


def add_lora(out: "Tensor", x: "Tensor", a: "Tensor", b: "Tensor", ends: Sequence[int], slots: "Tensor") -> None:
    """Add to each row of ``out`` the product of ``x`` with the matrices of its adapter."""
    _pick_compiled("adapters", "add_lora", x)(out, x, a, b, ends, slots)


def rope_and_store(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    cos: "Tensor",
    sin: "Tensor",
    positions: "Tensor",
    slot_mapping: "Tensor",
    kv_layer: "KVLayer",
    *,
    step_cache: dict[str, Any] | None = None,
) -> None:
    """Rotate ``q`` and ``k`` in place, store ``k`` and ``v`` in the KV cache."""
    _pick_compiled("rope_kv", "rope_and_store", q)(
        q, k, v, cos, sin, positions, slot_mapping, kv_layer.kv, kv_scales=kv_layer.scales, step_cache=step_cache
    )


def paged_attention(
    q: "Tensor",
    kv_layer: "KVLayer",
    block_tables: "Tensor",
    q_start: "Tensor",
    ctx_len: "Tensor",
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: "Tensor | None" = None,
    max_q_len: int,
    max_ctx_len: int,
    deterministic: bool = False,
    step_cache: dict[str, Any] | None = None,
) -> "Tensor":
    """Causal attention of each sequence's new tokens over its blocks."""
    return _pick("attention", "paged_attention", q)(
        q,
        kv_layer.kv,
        block_tables,
        q_start,
        ctx_len,
        kv_scales=kv_layer.scales,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        max_q_len=max_q_len,
        max_ctx_len=max_ctx_len,
        deterministic=deterministic,
        step_cache=step_cache,
    )


def prepare_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: "torch.dtype",
    kv_dtype: "torch.dtype",
    device: "torch.device",
    **variant: bool,
) -> None:
    """Compile attention for models of this shape on a CPU, so that nothing is compiled while it serves.

    ``variant``: ``has_cap``, ``has_sinks``.
    """
    if device.type == "cpu" and not ARE_KERNELS_FORCED:
        _load("attention", "prepare", False)(num_heads, num_kv_heads, head_dim, dtype, kv_dtype, **variant)


def apply_penalties(
    logits: "Tensor",
    row_start: "Tensor",
    token_ids: "Tensor",
    output_counts: "Tensor",
    bias: "Tensor",
    repetition: "Tensor",
    presence: "Tensor",
    frequency: "Tensor",
) -> None:
    """Apply repetition, presence and frequency penalties and biases to ``logits`` in place."""
    _pick("sampling", "apply_penalties", logits)(
        logits, row_start, token_ids, output_counts, bias, repetition, presence, frequency
    )


def apply_masks(logits: "Tensor", rows: "Tensor", masks: "Tensor") -> None:
    """Forbid, in some rows of ``logits`` and in place, the tokens whose bit is 0."""
    _pick("sampling", "apply_masks", logits)(logits, rows, masks)


def sample(
    logits: "Tensor",
    temperature: "Tensor",
    top_k: "Tensor",
    top_p: "Tensor",
    min_p: "Tensor",
    seeds: "Tensor",
    positions: "Tensor",
) -> "Tensor":
    """One token per row, drawn with noise that depends only on seed, position and token."""
    return _pick("sampling", "sample", logits)(logits, temperature, top_k, top_p, min_p, seeds, positions)


def softmax_topk(x: "Tensor", k: int, *, log: bool = False) -> "tuple[Tensor, Tensor]":
    """The ``k`` largest (log-)probabilities of each row and their columns."""
    result: tuple[Tensor, Tensor] = _pick("topk", "softmax_topk", x)(x, k, log=log)
    return result


def step_inputs(
    token_ids: "Tensor",
    q_start: "Tensor",
    ctx_len: "Tensor",
    slots: "Tensor",
    last_tokens: "Tensor",
    block_tables: "Tensor",
    *,
    block_size: int,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Token ids, positions and cache slots of a step's tokens from per-slot tables; -1: the slot's last token."""
    result: tuple[Tensor, Tensor, Tensor] = _pick("state", "step_inputs", token_ids)(
        token_ids, q_start, ctx_len, slots, last_tokens, block_tables, block_size=block_size
    )
    return result


def gather_blocks(kv: "Tensor", ids: "Tensor") -> "Tensor":
    """Copy the blocks ``ids`` of the KV cache into a new tensor."""
    return _pick("blocks", "gather_blocks", kv)(kv, ids)


def scatter_blocks(kv: "Tensor", ids: "Tensor", data: "Tensor") -> None:
    """Write ``data`` into the blocks ``ids`` of the KV cache."""
    _pick("blocks", "scatter_blocks", kv)(kv, ids, data)


def _pick(folder: str, function: str, x: "Tensor") -> Any:
    return _load(folder, function, is_for_kernels(x))


def _pick_compiled(folder: str, function: str, x: "Tensor") -> Any:
    """As ``_pick``, for operations with a compiled form on a CPU."""
    jit = _jit()
    if is_for_kernels(x) or x.dtype not in jit.COMPILED_DTYPES or not jit.is_available():
        return _pick(folder, function, x)
    return _load_compiled(folder, function)


@cache
def _jit() -> Any:
    return importlib.import_module("weft_kernels.jit")


def is_for_kernels(x: "Tensor") -> bool:
    """Whether operations on the tensor are Triton kernels."""
    return ARE_KERNELS_FORCED or bool(x.is_cuda)


@cache
def _load(folder: str, function: str, is_kernel: bool) -> Any:
    module = importlib.import_module(f"weft_kernels.{folder}.{'triton_kernel' if is_kernel else 'reference'}")
    return getattr(module, function)


@cache
def _load_compiled(folder: str, function: str) -> Any:
    return getattr(importlib.import_module(f"weft_kernels.{folder}.cpu_kernel"), function)
