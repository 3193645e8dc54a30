"""Compiles every kernel for an H100 on a machine without one, and prints the names; run by ``test_compile.py``.

Each function is called as the engine calls it, with tensors of the CPU; where it would launch, the kernel goes through
the whole compiler with the types and constants of that launch. Nothing runs, so that nothing can be said of results.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from weft_kernels.activation.triton_kernel import silu_mul
from weft_kernels.attention import launch
from weft_kernels.attention.triton_kernel import paged_attention
from weft_kernels.blocks.layout import cache_shape, split_layers
from weft_kernels.blocks.triton_kernel import gather_blocks, scatter_blocks
from weft_kernels.linear import lowbit_triton_kernel as lowbit
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4
from weft_kernels.linear.triton_kernel import linear
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.rope_kv.triton_kernel import rope_and_store
from weft_kernels.sampling.triton_kernel import apply_penalties, sample
from weft_kernels.state.triton_kernel import step_inputs
from weft_kernels.topk.triton_kernel import softmax_topk

TARGET = GPUTarget("cuda", 90, 32)
DTYPE = torch.float16  # multiplied as it is on both machines, where bfloat16 is cast for the interpreter on a CPU


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
    print(kernel.__name__.strip("_").removesuffix("_kernel"))


def attend(q_len: int, context: int, *, deterministic: bool, window: int = 0, kv_dtype: torch.dtype = DTYPE) -> None:
    """Attention of two sequences with ``q_len`` new tokens each."""
    tables = torch.zeros(2, context // 16, dtype=torch.int32)
    starts, contexts = torch.tensor([0, q_len, 2 * q_len]).int(), torch.tensor([context, context]).int()
    kv = torch.zeros(cache_shape(1, 3, 16, 2, 64, kv_dtype), dtype=kv_dtype)
    layer = split_layers(kv, 2, 64)[1]
    paged_attention(
        torch.zeros(2 * q_len, 8, 64, dtype=DTYPE),
        layer.kv,
        tables,
        starts,
        contexts,
        kv_scales=layer.scales,
        scale=0.1,
        window=window,
        soft_cap=float(window),
        max_q_len=q_len,
        max_ctx_len=context,
        deterministic=deterministic,
    )


JITFunction.run = compile_instead
launch.num_processors = lambda device: 132  # as many as the target has, so that keys are shared by programs
attend(64, 1024, deterministic=False)
attend(64, 1024, deterministic=True, window=100)
attend(1, 4096, deterministic=False)
attend(1, 4096, deterministic=False, kv_dtype=torch.int8)
attend(64, 1024, deterministic=False, kv_dtype=torch.int8)
attend(1, 4096, deterministic=True, kv_dtype=torch.float8_e4m3fn)
ids = torch.zeros(2, dtype=torch.int32)
kv = torch.zeros(1, 3, 2, 16, 2, 64, dtype=DTYPE)
q, k, v = torch.zeros(2, 12, 64, dtype=DTYPE).split([8, 2, 2], dim=1)
angles = torch.zeros(10, 32)
for kv_dtype in (DTYPE, torch.int8, torch.float8_e4m3fn):
    layer = split_layers(torch.zeros(cache_shape(1, 3, 16, 2, 64, kv_dtype), dtype=kv_dtype), 2, 64)[1]
    rope_and_store(q, k, v, angles, angles, ids, ids.long(), layer.kv, kv_scales=layer.scales)
scatter_blocks(kv, ids[:1], gather_blocks(kv, ids[:1]))
step_inputs(ids, torch.zeros(3, dtype=torch.int32), ids, ids, ids, ids.view(2, 1), block_size=16)
x = torch.zeros(2, 256, dtype=DTYPE)
linear(x, x.repeat(64, 1), x[0].repeat(1)[:128].contiguous(), deterministic=True)
lowbit.num_processors = lambda device: 132
permuted = replace(quantize_linear(torch.ones(64, 1024), 4, 128), permutation=torch.arange(1024))
for quantised, row_counts in (
    (quantize_linear(torch.ones(64, 1024), 8), (1, 3)),
    (quantize_linear(torch.ones(64, 1024), 4, 32, is_symmetric=False, scales_dtype=torch.float16), (1, 64, 65)),
    (quantize_nf4(torch.ones(64, 1024)), (1, 3)),
    (permuted, (3, 65)),
):
    for num_rows in row_counts:
        lowbit.linear(torch.zeros(num_rows, 1024, dtype=DTYPE), quantised, deterministic=num_rows == 64)
rms_norm(x, x[0], 1e-5, x)
silu_mul(x)
softmax_topk(x.float(), 5)
logits, ones = torch.zeros(2, 1000), torch.ones(2)
apply_penalties(logits, torch.tensor([0, 1, 2]).int(), ids, ids, ones, ones, ones, ones)
sample(logits, ones, ids, ones, ones, ids.long(), ids)
