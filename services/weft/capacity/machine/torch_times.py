"""How long operations take in torch, and in the kernels of the language-model engine, on this CPU; imports torch."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from weft.capacity.machine.profile import LinearTimes, TorchTimes
from weft.llm import ops
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights
from weft_kernels.linear.products import Product, linear

_ROUNDS, _SIDE = 4, 1024
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Weights of all products of a step: within the caches, and beyond.
_RESIDENT_BYTES, _STREAMED_BYTES, _STREAMED_CODES_BYTES = 4 << 20, 256 << 20, 64 << 20
#: Types of weights by their bits.
KINDS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
_HEADS, _HEAD_DIM, _BLOCK = 8, 64, 8
_CONTEXTS = (64, 512, 2048)


def measure_linear_times(num_threads: int) -> LinearTimes:
    """Measure all of it with so many threads of torch; takes about ten seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            products = {kind: _products(kind, num_threads) for kind in KINDS}
            attention = [_attention(context, num_threads) for context in _CONTEXTS]
    finally:
        torch.set_num_threads(before)
    return LinearTimes(products, [decode for decode, _ in attention], [prefill for _, prefill in attention])


def _products(kind: str, num_threads: int) -> list[tuple[float, float, float]]:
    bits = KINDS[kind]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    points = []
    streamed_bytes = _STREAMED_BYTES if bits >= 16 else _STREAMED_CODES_BYTES  # codes take long to make
    for num_bytes in (_RESIDENT_BYTES, streamed_bytes):
        num_products = max(num_bytes * 8 // bits // _SIDE**2, 1)
        weight = torch.randn(_SIDE, _SIDE).mul_(_SIDE**-0.5).to(dtype)
        options = {"dtype": dtype, "num_bits": bits if bits < 16 else 0}
        products = [linear(weight.clone(), **options) for _ in range(num_products)]
        for rows in _ROWS:
            x = torch.randn(rows, _SIDE).to(dtype)
            seconds = best_s(partial(_multiplied, products, x), num_threads)
            points.append((float(num_bytes), float(rows), num_products * rows * _SIDE**2 / seconds))
    return points


def _multiplied(products: Sequence[Product], x: torch.Tensor) -> None:
    for multiply in products:
        multiply(x)


def _attention(context: int, num_threads: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Rate of one new token after ``context``, and of a prompt of ``context`` tokens."""
    config = TransformerConfig(64, _HEADS * _HEAD_DIM, 64, 1, _HEADS, _HEADS, _HEAD_DIM, 4096, rope={"rope_theta": 1e4})
    model = TransformerModel(config, random_weights(config, 0), max_model_len=4096)
    model.prepare()
    num_blocks = -(-context // _BLOCK)
    layer = model._layers_of(model.new_kv(num_blocks + 1, _BLOCK))[0]
    tables = torch.arange(1, num_blocks + 1, dtype=torch.int32).view(1, -1)

    def run(num_new: int) -> float:
        q = torch.randn(num_new, _HEADS, _HEAD_DIM)
        start, length = torch.tensor([0, num_new], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
        call: Callable[[], Any] = lambda: ops.paged_attention(  # noqa: E731
            q, layer, tables, start, length, scale=0.1, max_q_len=num_new, max_ctx_len=context, step_cache={}
        )
        return best_s(call, num_threads)

    kv_bytes = 2.0 * context * _HEADS * _HEAD_DIM * 4
    flops = 4.0 * _HEADS * _HEAD_DIM * context * (context + 1) / 2
    return (float(context), kv_bytes / run(1)), (float(context), flops / run(context))


def best_s(call: Callable[[], Any], num_threads: int) -> float:
    """Seconds of the fastest of some calls: of this thread's CPU where there is one, else by the clock."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    call()
    best = float("inf")
    for _ in range(_ROUNDS):
        runs, start = 0, clock()
        while clock() - start < 2e-3:
            call()
            runs += 1
        best = min(best, (clock() - start) / runs)
    return best


_TORCH_ROWS, _TORCH_SIDES = (1, 4, 16, 64, 256), (16, 64, 256, 1024)
_NUM_NODES = 16


class _Chain(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self._num_nodes = num_nodes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._num_nodes):
            x = x + 1.0
        return x


def measure_torch_times(num_threads: int) -> TorchTimes:
    """Measure with so many threads; takes about three seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            return _measure(num_threads)
    finally:
        torch.set_num_threads(before)


def _measure(num_threads: int) -> TorchTimes:
    products = []
    for side in _TORCH_SIDES:
        weight, bias = torch.randn(side, side), torch.zeros(side)
        for rows in _TORCH_ROWS:
            x = torch.randn(rows, side)
            seconds = best_s(partial(torch.nn.functional.linear, x, weight, bias), num_threads)
            products.append((float(rows), float(side), seconds))
    x = torch.ones(2, 4)
    batch = torch.export.Dim("batch", min=1, max=64)
    one, many = (
        torch.export.export(_Chain(num), (x,), dynamic_shapes=({0: batch},)).module() for num in (1, 1 + _NUM_NODES)
    )
    one_s, many_s = best_s(lambda: one(x), num_threads), best_s(lambda: many(x), num_threads)
    node_s = max((many_s - one_s) / _NUM_NODES, 1e-7)
    return TorchTimes(products, node_s, max(one_s - node_s, 1e-6))
