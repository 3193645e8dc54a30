"""Prints how many variants of each kernel a GPU would have to compile for steps of 1 to 9 rows; see ``test_compile``.

No GPU is needed. Each function is called with tensors of the CPU as the engine lays them out. Where it would launch, it
is noted by which key the Triton language finds a compiled kernel again; nothing is compiled and nothing runs.
"""

from collections import defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from weft_kernels.activation.triton_kernel import silu_mul
from weft_kernels.attention import launch
from weft_kernels.attention.triton_kernel import paged_attention
from weft_kernels.linear import lowbit_triton_kernel as lowbit
from weft_kernels.linear.quantizers import quantize_linear
from weft_kernels.linear.triton_kernel import linear
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.rope_kv.triton_kernel import rope_and_store
from weft_kernels.sampling.triton_kernel import apply_penalties, sample
from weft_kernels.state.triton_kernel import step_inputs
from weft_kernels.topk.triton_kernel import softmax_topk

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 7, 1, 64, 16
VOCAB_SIZE, CONTEXT_LEN = 700, 4096
QUANTISED = quantize_linear(torch.ones(128, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), 4, 64)
variants: defaultdict[str, set[str]] = defaultdict(set)


def note_instead(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
    """What ``kernel[grid](*args, **options)`` does here: add the key of its variant."""
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialisation, options = bind(*args, **options)
    variants[kernel.__name__.strip("_").removesuffix("_kernel")].add(f"{specialisation} {options}")


def run_step(num_rows: int) -> None:
    """One new token of each of ``num_rows`` sequences, through a layer and the sampler."""
    ids = torch.arange(num_rows, dtype=torch.int32)
    tables = torch.zeros(16, CONTEXT_LEN // BLOCK_SIZE, dtype=torch.int32)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    step_inputs(ids, starts, ids.clone(), ids.clone(), tables[:, 0].contiguous(), tables, block_size=BLOCK_SIZE)
    num_all_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    x = torch.zeros(num_rows, num_all_heads * HEAD_DIM, dtype=torch.float16)
    linear(x, x.new_zeros(128, x.shape[1]), deterministic=True)
    if num_rows > 1:
        lowbit.linear(x, QUANTISED)
    rms_norm(x, x[0].clone(), 1e-5, x.clone())
    silu_mul(x)
    q, k, v = x.view(num_rows, num_all_heads, HEAD_DIM).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
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
    logits, columns = torch.zeros(num_rows, VOCAB_SIZE), torch.ones(6, num_rows)
    temperature, top_p, min_p, repetition, presence, frequency = columns.unbind(0)
    apply_penalties(logits, starts, ids, ids.clone(), torch.ones(num_rows), repetition, presence, frequency)
    sample(logits, temperature, ids.clone(), top_p, min_p, ids.long(), ids.clone())
    softmax_topk(logits, 5, log=True, tile_columns=256)


backend = make_backend(GPUTarget("cuda", 90, 32))
JITFunction.run = note_instead
launch.num_processors = lowbit.num_processors = lambda device: 132
for num_rows in range(1, 10):
    run_step(num_rows)
for name, keys in variants.items():
    print(name, len(keys))
