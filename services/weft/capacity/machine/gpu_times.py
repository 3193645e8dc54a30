"""How fast the GPU of this machine multiplies and copies; imports torch."""

import time
from collections.abc import Callable

import torch

from weft.base.errors import UnsupportedError
from weft.capacity.machine.profile import GpuFigures

_SIDE, _COPY_BYTES = 8192, 1 << 30
_NUM_KERNELS, _ROUNDS = 200, 5
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_gpu(num_threads: int) -> GpuFigures:  # of sections, though a GPU has no number of threads
    """Measure the first GPU; takes some seconds.

    Raises:
        UnsupportedError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no GPU here; plan for one of the table by its name")
    device = torch.device("cuda:0")
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    flops, moved, kernel_s = measure_device(device, _SIDE, min(_COPY_BYTES, free_bytes // 4))
    torch.backends.cuda.matmul.allow_tf32 = True
    flops["tf32"] = _flops(torch.float32, device, _SIDE)
    return GpuFigures(torch.cuda.get_device_name(device), total_bytes, moved, flops, kernel_s)


def measure_device(device: torch.device, side: int, copy_bytes: int) -> tuple[dict[str, float], float, float]:
    """Operations per second by type, bytes per second of a copy, seconds of a kernel that does next to nothing."""
    flops = {kind: _flops(dtype, device, side) for kind, dtype in _DTYPES.items()}
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2.0 * copy_bytes / _best_s(lambda: target.copy_(source), device)
    small = torch.zeros(16, device=device)
    kernels_s = _best_s(lambda: [small.add_(1) for _ in range(_NUM_KERNELS)], device)
    return flops, moved, kernels_s / _NUM_KERNELS


def _flops(dtype: torch.dtype, device: torch.device, side: int) -> float:
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * side**3 / _best_s(lambda: a @ b, device)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
