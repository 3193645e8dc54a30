"""Calls every kernel as the engine does, and notes where it would launch; run by ``test_compile.py``.

``compile``: the kernel goes through the whole compiler with the types and constants of that launch, for an H100 on a
machine without one, and its name is printed. ``count``: prints how many variants of each kernel a GPU would have to
compile for steps of 1 to 9 rows, by the key with which the Triton language finds a compiled kernel again. Tensors are
of the CPU, as the engine lays them out; nothing runs, so that nothing can be said of results.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

from weft_kernels.activation.triton_kernel import clamped_swiglu, silu_mul
from weft_kernels.adapters.triton_kernel import add_lora
from weft_kernels.attention import launch
from weft_kernels.attention.triton_kernel import paged_attention
from weft_kernels.blocks.layout import cache_shape, split_layers
from weft_kernels.blocks.triton_kernel import gather_blocks, scatter_blocks
from weft_kernels.experts.triton_kernel import combine
from weft_kernels.linear import lowbit_triton_kernel as lowbit
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4
from weft_kernels.linear.triton_kernel import linear
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.rope_kv.triton_kernel import rope_and_store
from weft_kernels.sampling.triton_kernel import apply_masks, apply_penalties, sample
from weft_kernels.state.triton_kernel import step_inputs
from weft_kernels.topk.triton_kernel import softmax_topk

TARGET = GPUTarget("cuda", 90, 32)
DTYPE = torch.float16  # multiplied as it is on both machines, where bfloat16 is cast for the interpreter on a CPU
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 7, 1, 64, 16
NUM_ALL_HEADS, CONTEXT_LEN = NUM_HEADS + 2 * NUM_KV_HEADS, 4096
CODES = quantize_linear(torch.ones(128, NUM_ALL_HEADS * HEAD_DIM), 4, 64)
backend = make_backend(TARGET)
variants: defaultdict[str, set[str]] = defaultdict(set)
form = ""  # of the kernels that are noted


def name_of(kernel: JITFunction) -> str:
    """As the tests know it."""
    return kernel.__name__.strip("_").removesuffix("_kernel")


def compile_instead(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
    """What ``kernel[grid](*args, **options)`` does here: compile it for ``TARGET`` and print its name."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor):
                attributes[parameter.num,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    assert triton.compile(source, target=TARGET, options=options).asm["cubin"]
    print(name_of(kernel))


def note_instead(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
    """What ``kernel[grid](*args, **options)`` does here: add the key of its variant."""
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialisation, options = bind(*args, **options)
    variants[name_of(kernel) + form].add(f"{specialisation} {options}")


def attend(q_len: int, context: int, *, window: int = 0, kv_dtype: torch.dtype = DTYPE, **options: Any) -> None:
    """Attention of two sequences with ``q_len`` new tokens each."""
    layer = split_layers(torch.zeros(cache_shape(1, 3, 16, 2, 64, kv_dtype), dtype=kv_dtype), 2, 64)[1]
    paged_attention(
        torch.zeros(2 * q_len, 8, 64, dtype=DTYPE),
        layer.kv,
        torch.zeros(2, context // 16, dtype=torch.int32),
        torch.tensor([0, q_len, 2 * q_len]).int(),
        torch.tensor([context, context]).int(),
        **{"kv_scales": layer.scales, "scale": 0.1, "window": window, "soft_cap": float(window)},
        **{"max_q_len": q_len, "max_ctx_len": context, **options},
    )


def run_step(num_rows: int) -> None:
    """One new token of each of ``num_rows`` sequences, through a layer and the sampler."""
    ids = torch.arange(num_rows, dtype=torch.int32)
    tables = torch.zeros(16, CONTEXT_LEN // BLOCK_SIZE, dtype=torch.int32)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    step_inputs(ids, starts, ids.clone(), ids.clone(), tables[:, 0].contiguous(), tables, block_size=BLOCK_SIZE)
    x = torch.zeros(num_rows, NUM_ALL_HEADS * HEAD_DIM, dtype=DTYPE)
    linear(x, x.new_zeros(128, x.shape[1]), deterministic=True)
    if num_rows > 1:
        lowbit.linear(x, CODES)
    rms_norm(x, x[0].clone(), 1e-5, x.clone())
    silu_mul(x)
    add_lora(x.clone(), x, x.new_zeros(2, x.shape[1], 48), x.new_zeros(2, 16, x.shape[1]), (448, 512, 576), ids)
    q, k, v = x.view(num_rows, NUM_ALL_HEADS, HEAD_DIM).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    kv_layer = x.new_zeros(2, 3, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)[:, 1]
    angles = torch.zeros(10, HEAD_DIM // 2)
    rope_and_store(q, k, v, angles, angles, ids, ids.long(), kv_layer)
    paged_attention(
        q,
        kv_layer,
        torch.zeros(num_rows, CONTEXT_LEN // BLOCK_SIZE, dtype=torch.int32),
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.full_like(ids, CONTEXT_LEN),
        scale=0.125,
        max_q_len=1,
        max_ctx_len=CONTEXT_LEN,
    )
    logits, columns = torch.zeros(num_rows, 700), torch.ones(6, num_rows)
    temperature, top_p, min_p, repetition, presence, frequency = columns.unbind(0)
    apply_penalties(logits, starts, ids, ids.clone(), torch.ones(num_rows), repetition, presence, frequency)
    apply_masks(logits, ids.clone(), torch.zeros(num_rows, 22, dtype=torch.int32))
    sample(logits, temperature, ids.clone(), top_p, min_p, ids.long(), ids.clone())
    softmax_topk(logits, 5, log=True, tile_columns=256)
    global form  # noqa: PLW0603
    form = "-of-experts"
    multiply_experts(x, num_chosen=2)
    form = ""


def multiply_experts(x: torch.Tensor, num_chosen: int, *, deterministic: bool = False) -> None:
    """Products of rows with 4 experts, numbers and codes, and their sum."""
    rows = torch.arange(len(x)).repeat_interleave(num_chosen)
    options = {"starts": torch.zeros(5, dtype=torch.int32), "rows": rows, "num_experts": 4}
    y = linear(x, x.new_zeros(128, x.shape[1]), deterministic=deterministic, **options)
    lowbit.linear(x, CODES, deterministic=deterministic, **options)
    combine(y, torch.arange(len(rows)).view(-1, num_chosen), torch.zeros(len(x), num_chosen))


def run_other_forms() -> None:
    """Prompts, deterministic modes, caches of codes, weights of codes, a whole row's best, and copies of blocks."""
    attend(64, 1024, deterministic=False)
    attend(64, 1024, deterministic=True, window=100)
    attend(1, 4096, deterministic=False, kv_dtype=torch.int8)
    attend(1, 4096, deterministic=True, window=100, sinks=torch.zeros(8))
    attend(64, 1024, deterministic=False, kv_dtype=torch.int8)
    attend(1, 4096, deterministic=True, kv_dtype=torch.float8_e4m3fn)
    ids, angles = torch.zeros(2, dtype=torch.int32), torch.zeros(10, 32)
    kv = torch.zeros(1, 3, 2, 16, 2, 64, dtype=DTYPE)
    q, k, v = torch.zeros(2, 12, 64, dtype=DTYPE).split([8, 2, 2], dim=1)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        layer = split_layers(torch.zeros(cache_shape(1, 3, 16, 2, 64, kv_dtype), dtype=kv_dtype), 2, 64)[1]
        rope_and_store(q, k, v, angles, angles, ids, ids.long(), layer.kv, kv_scales=layer.scales)
    scatter_blocks(kv, ids[:1], gather_blocks(kv, ids[:1]))
    x = torch.zeros(2, 256, dtype=DTYPE)
    linear(x, x.repeat(64, 1), x[0].repeat(1)[:128].contiguous(), deterministic=True)
    permuted = replace(quantize_linear(torch.ones(64, 1024), 4, 128), permutation=torch.arange(1024))
    for codes, row_counts in (
        (quantize_linear(torch.ones(64, 1024), 8), (1, 3)),
        (quantize_linear(torch.ones(64, 1024), 4, 32, is_symmetric=False, scales_dtype=DTYPE), (1, 64, 65)),
        (quantize_nf4(torch.ones(64, 1024)), (1, 3)),
        (permuted, (3, 65)),
    ):
        for num_rows in row_counts:
            lowbit.linear(torch.zeros(num_rows, 1024, dtype=DTYPE), codes, deterministic=num_rows == 64)
    softmax_topk(x.float(), 5)
    clamped_swiglu(x)
    multiply_experts(torch.zeros(50, NUM_ALL_HEADS * HEAD_DIM, dtype=DTYPE), 2)
    multiply_experts(torch.zeros(3, NUM_ALL_HEADS * HEAD_DIM, dtype=DTYPE), 2, deterministic=True)


launch.num_processors = lowbit.num_processors = lambda device: 132  # as the target: keys are shared by programs
if sys.argv[1] == "compile":
    JITFunction.run = compile_instead
    run_step(2)
    run_other_forms()
else:
    JITFunction.run = note_instead
    for num_rows in range(1, 10):
        run_step(num_rows)
    for name, keys in variants.items():
        print(name, len(keys))
