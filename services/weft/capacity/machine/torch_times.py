"""How long operations take in torch on this CPU, outside of any model; imports torch."""

from functools import partial

import torch

from weft.capacity.machine.figures import TorchTimes
from weft.capacity.machine.linear_times import best_s

_ROWS, _SIDES = (1, 4, 16, 64, 256), (16, 64, 256, 1024)
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
    for side in _SIDES:
        weight, bias = torch.randn(side, side), torch.zeros(side)
        for rows in _ROWS:
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
