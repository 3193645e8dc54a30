"""Measures operations in torch and in the engine's kernels on this CPU, and on its GPU; imports torch."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from weft.base.errors import UnsupportedError
from weft.capacity.machine.profile import GpuFigures, LinearTimes, TorchTimes
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


@contextmanager
def _inference(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def measure_linear_times(num_threads: int) -> LinearTimes:
    """Measure the engine's kernels with ``num_threads`` torch threads; takes about ten seconds."""
    with _inference(num_threads):
        products = {kind: _products(kind, num_threads) for kind in KINDS}
        attention = [_attention(context, num_threads) for context in _CONTEXTS]
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
    """Seconds of the fastest of several calls: CPU time of this thread if there is one, else wall time."""
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


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
    """Measure exported programs with ``num_threads`` threads; takes about three seconds."""
    with _inference(num_threads):
        products = []
        for side in _TORCH_SIDES:
            weight, bias = torch.randn(side, side), torch.zeros(side)
            for rows in _TORCH_ROWS:
                x = torch.randn(rows, side)
                seconds = best_s(partial(torch.nn.functional.linear, x, weight, bias), num_threads)
                products.append((float(rows), float(side), seconds))
        shares = _shares_of_float32(num_threads)
        x = torch.ones(2, 4)
        batch = torch.export.Dim("batch", min=1, max=64)
        one, many = (
            torch.export.export(_Chain(num), (x,), dynamic_shapes=({0: batch},)).module() for num in (1, 1 + _NUM_NODES)
        )
        one_s, many_s = best_s(lambda: one(x), num_threads), best_s(lambda: many(x), num_threads)
    node_s = max((many_s - one_s) / _NUM_NODES, 1e-7)
    return TorchTimes(products, node_s, max(one_s - node_s, 1e-6), shares)


def _shares_of_float32(num_threads: int) -> dict[str, float]:
    """Times of a product by type of numbers, over that of float32."""
    x, weight = torch.randn(64, 256), torch.randn(256, 256)
    times_s = {kind: best_s(partial(torch.mm, x.to(of), weight.to(of)), num_threads) for kind, of in _DTYPES.items()}
    times_s["int8"] = best_s(partial(torch._int_mm, x.to(torch.int8), weight.to(torch.int8)), num_threads)
    return {kind: seconds / times_s["fp32"] for kind, seconds in times_s.items()}


_GPU_SIDE, _COPY_BYTES = 8192, 1 << 30
_NUM_KERNELS, _GPU_ROUNDS = 200, 5


def measure_gpu(num_threads: int) -> GpuFigures:  # of sections, though a GPU has no number of threads
    """Measure the first GPU; takes some seconds. Raises UnsupportedError if torch sees none."""
    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no GPU here; plan for one of the table by its name")
    device = torch.device("cuda:0")
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    flops, moved, kernel_s = measure_device(device, _GPU_SIDE, min(_COPY_BYTES, free_bytes // 4))
    torch.backends.cuda.matmul.allow_tf32 = True
    flops["tf32"] = _flops(torch.float32, device, _GPU_SIDE)
    return GpuFigures(torch.cuda.get_device_name(device), total_bytes, moved, flops, kernel_s)


def measure_device(device: torch.device, side: int, copy_bytes: int) -> tuple[dict[str, float], float, float]:
    """Operations per second by type, bytes per second of a copy, seconds of an almost empty kernel."""
    flops = {kind: _flops(dtype, device, side) for kind, dtype in _DTYPES.items()}
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2.0 * copy_bytes / _best_gpu_s(lambda: target.copy_(source), device)
    small = torch.zeros(16, device=device)
    kernels_s = _best_gpu_s(lambda: [small.add_(1) for _ in range(_NUM_KERNELS)], device)
    return flops, moved, kernels_s / _NUM_KERNELS


def _flops(dtype: torch.dtype, device: torch.device, side: int) -> float:
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * side**3 / _best_gpu_s(lambda: a @ b, device)


def _best_gpu_s(call: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    best = float("inf")
    for _ in range(_GPU_ROUNDS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
