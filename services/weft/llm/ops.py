"""Operator dispatch: every operation of the engine runs in torch or compiled on a CPU, as a Triton kernel on a GPU.

The device of the first tensor decides. The environment variable ``WEFT_KERNELS=triton`` sends every call to the
kernels, which need the interpreter on a CPU (``TRITON_INTERPRET=1``). The first call of an operation imports its
module, so a CPU server never imports the Triton language.

Arguments, shapes, errors and effects of each function are documented in ``reference.py`` of the kernel's folder.
"""

import importlib
import os
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import torch

from weft.base.errors import InvalidArgumentError
from weft_kernels import jit
from weft_kernels.blocks.layout import KVLayer
from weft_kernels.linear import cpu
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize, quantized_bytes

_VARIABLE = "WEFT_KERNELS"
_CHOICES = ("auto", "triton")

_choice = os.environ.get(_VARIABLE) or "auto"
if _choice not in _CHOICES:
    raise InvalidArgumentError(
        f"{_VARIABLE} must be one of {', '.join(_CHOICES)}, got '{_choice}'; unset it for 'auto'"
    )
_ARE_KERNELS_FORCED = _choice == "triton"
_COMPILED_DTYPES = (torch.float32, torch.bfloat16)


#: A weight ``[out, in]``: numbers, codes, or where its parts have different codes, the parts one after another.
Matrix: TypeAlias = torch.Tensor | QuantizedWeight | tuple[torch.Tensor | QuantizedWeight, ...]


class Linear(Protocol):
    """``x @ weight.T + bias``: ``[T, in]`` to ``[T, out]``, newly allocated."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows; ``x`` is not modified."""


def linear(
    weight: Matrix,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    num_bits: int = 0,
) -> Linear:
    """The fastest product with the weight ``[out, in]`` that its device has; it need not keep the weight itself.

    Args:
        weight: On the device of the product. Codes without a product of their own become numbers.
        bias: ``[out]``; None for none.
        dtype: Type of rows and results, which a weight of numbers has.
        deterministic: A row's result is bitwise independent of the other rows.
        num_bits: 8 or 4: a weight of numbers is rounded to so many bits. 0: it is not.
    """
    if isinstance(weight, tuple):
        sizes = [part.shape[0] for part in weight]
        biases = [None] * len(weight) if bias is None else bias.split(sizes)
        options: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "num_bits": num_bits}
        return _Joined([linear(part, own, **options) for part, own in zip(weight, biases, strict=True)])
    if not _ARE_KERNELS_FORCED and weight.device.type == "cpu":
        return cpu.linear(weight, bias, dtype=dtype, deterministic=deterministic, num_bits=num_bits)
    if isinstance(weight, torch.Tensor) and num_bits:
        weight = quantize(weight, num_bits)
    if isinstance(weight, QuantizedWeight):
        from weft_kernels.linear import lowbit_triton_kernel  # noqa: PLC0415  # needs triton

        return partial(lowbit_triton_kernel.linear, weight=weight, bias=bias, deterministic=deterministic)
    multiply = _pick("linear", "linear", weight)
    return partial(multiply, weight=weight.contiguous(), bias=bias, deterministic=deterministic)


def matrix_bytes(weight: Matrix, dtype: torch.dtype, num_bits: int = 0) -> int:
    """Bytes that a product with the weight reads, by the arguments of ``linear``; paddings are not counted."""
    if isinstance(weight, tuple):
        return sum(matrix_bytes(part, dtype, num_bits) for part in weight)
    if isinstance(weight, QuantizedWeight):
        return weight.num_bytes
    if not num_bits:
        return int(weight.numel() * dtype.itemsize)
    return quantized_bytes((weight.shape[0], weight.shape[1]), num_bits)


class _Joined:
    """Products of one input with several weights, side by side."""

    def __init__(self, products: list[Linear]) -> None:
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiply(x) for multiply in self._products], 1)


def faster_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> torch.dtype:
    """``dtype``, or float32 where that is faster on this CPU, by products with a weight ``[out, in]`` of the shape.

    Without instructions for 16-bit numbers a CPU converts them. Few and many rows are measured, as decoding and prompts
    have; float32 has to win by 10 % in one of them.
    """
    if dtype == torch.float32:
        return torch.float32
    pairs = [[cpu.product_ns(shape, each, num_rows) for each in (dtype, torch.float32)] for num_rows in (1, 32)]
    return dtype if all(own_ns <= 1.1 * float_ns for own_ns, float_ns in pairs) else torch.float32


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of ``x + residual`` times ``weight``, and the sum itself."""
    result: tuple[torch.Tensor, torch.Tensor] = _pick_compiled("norm", "rms_norm", x)(x, weight, eps, residual)
    return result


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu`` of the first half of each row times the second half."""
    return _pick_compiled("activation", "silu_mul", gate_up)(gate_up)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_layer: KVLayer,
    *,
    step_cache: dict[str, Any] | None = None,
) -> None:
    """Rotate ``q`` and ``k`` in place, store ``k`` and ``v`` in the KV cache."""
    _pick_compiled("rope_kv", "rope_and_store", q)(
        q, k, v, cos, sin, positions, slot_mapping, kv_layer.kv, kv_scales=kv_layer.scales, step_cache=step_cache
    )


def paged_attention(
    q: torch.Tensor,
    kv_layer: KVLayer,
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
        kv_layer.kv,
        block_tables,
        q_start,
        ctx_len,
        kv_scales=kv_layer.scales,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        max_q_len=max_q_len,
        max_ctx_len=max_ctx_len,
        deterministic=deterministic,
        step_cache=step_cache,
    )


def prepare_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Compile attention for models of this shape on a CPU, so that nothing is compiled while it serves."""
    if device.type == "cpu" and not _ARE_KERNELS_FORCED:
        _load("attention", "prepare", False)(num_heads, num_kv_heads, head_dim, dtype, kv_dtype)


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


def step_inputs(
    token_ids: torch.Tensor,
    q_start: torch.Tensor,
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and cache slots of a step's tokens from per-slot tables; -1: the slot's last token."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _pick("state", "step_inputs", token_ids)(
        token_ids, q_start, ctx_len, slots, last_tokens, block_tables, block_size=block_size
    )
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


def _pick_compiled(folder: str, function: str, x: torch.Tensor) -> Any:
    """As ``_pick``, for what has a form on a CPU that is compiled."""
    if _is_for_kernels(x) or x.dtype not in _COMPILED_DTYPES or not jit.is_available():
        return _pick(folder, function, x)
    return _load_compiled(folder, function)


def _is_for_kernels(x: torch.Tensor) -> bool:
    return _ARE_KERNELS_FORCED or bool(x.is_cuda)


@cache
def _load(folder: str, function: str, is_kernel: bool) -> Any:
    module = importlib.import_module(f"weft_kernels.{folder}.{'triton_kernel' if is_kernel else 'reference'}")
    return getattr(module, function)


@cache
def _load_compiled(folder: str, function: str) -> Any:
    return getattr(importlib.import_module(f"weft_kernels.{folder}.cpu_kernel"), function)
