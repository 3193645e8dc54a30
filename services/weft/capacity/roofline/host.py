"""Time of a batch on this machine's CPU, from the measured times of single operations."""

import math
from functools import cached_property

from weft.capacity.costs.operation import BatchCost, Operation, Weights
from weft.capacity.machine.profile import RESIDENT_BYTES, Times, TorchTimes
from weft.capacity.roofline.curves import interpolated, level, on_grid
from weft.capacity.roofline.timing import Timing

#: Float32 numbers of a vector register: products compute that many outputs at a time.
_LANES = 16


class OnnxHost:
    """ONNX Runtime: what operations of the same family and size took in models made for that.

    Args:
        times: Measured with as many threads as the model will have.
    """

    def __init__(self, times: Times) -> None:
        self._times = times

    def batch(self, cost: BatchCost, weights: Weights) -> Timing:
        """See ``BatchTimer``; weights beyond the caches are read from memory by every run."""
        held_bytes = sum(operation.weight_bytes for operation in cost.operations)
        run_s = self._times.run_s + self._times.tensor_s * cost.num_tensors
        return _timing(run_s, self._times.node_s, cost, [self._operation_s(op, held_bytes) for op in cost.operations])

    def _operation_s(self, operation: Operation, held_bytes: int) -> float:
        return max(_family_s(operation, held_bytes, self), self._times.node_s)

    def other_s(self, operation: Operation) -> float:
        """Seconds of what is no product."""
        family = "copy" if operation.family == "gather" else operation.family
        return interpolated(self._times.families[family], operation.moved_bytes + operation.weight_bytes)

    def product_rate(self, rows: float, side: float, held_bytes: int) -> float:
        """Operations per second of a product with a weight of this side, in a model of so many bytes of weights."""
        near = on_grid(self._product_rates, rows, side)
        far: dict[float, list[tuple[float, float]]] = {}
        for num_bytes, num_rows, rate in self._times.streamed:
            far.setdefault(num_bytes, []).append((num_rows, rate))
        by_bytes = [(num_bytes, min(level(points, rows), near)) for num_bytes, points in sorted(far.items())]
        return level([(RESIDENT_BYTES, near), *by_bytes], max(held_bytes, 1))

    def matmul_rate(self, side: float) -> float:
        """Operations per second of a product of activations."""
        return level([(tile, 2 * tile * tile * 32 / seconds) for tile, seconds in self._times.matmuls], side)

    def conv_rate(self, rows: float, side: float) -> float:
        """Operations per second of a convolution."""
        return on_grid(self._conv_rates, rows, side)

    @cached_property
    def _product_rates(self) -> list[tuple[float, float, float]]:
        return [(rows, side, 2 * rows * side * side / seconds) for rows, side, seconds in self._times.products]

    @cached_property
    def _conv_rates(self) -> list[tuple[float, float, float]]:
        return [(rows, math.sqrt(a * b), 2 * rows * a * b / seconds) for rows, a, b, seconds in self._times.convs]


class TorchHost:
    """Exported programs of torch: products as measured in torch, all else as in ONNX Runtime, and its own overhead.

    Args:
        times: Of torch.
        others: Of ONNX Runtime, for what is no product.
    """

    def __init__(self, times: TorchTimes, others: Times) -> None:
        self._times = times
        self._others = OnnxHost(others)

    def batch(self, cost: BatchCost, weights: Weights) -> Timing:
        """See ``BatchTimer``."""
        held_bytes = sum(operation.weight_bytes for operation in cost.operations)
        seconds = [self._operation_s(operation, held_bytes) for operation in cost.operations]
        return _timing(self._times.run_s, self._times.node_s, cost, seconds)

    def _operation_s(self, operation: Operation, held_bytes: int) -> float:
        own_s = 0.0 if operation.family == "view" else _family_s(operation, held_bytes, self)
        return self._times.node_s + own_s

    def other_s(self, operation: Operation) -> float:
        """Seconds of what is no product."""
        return self._others.other_s(operation)

    def product_rate(self, rows: float, side: float, held_bytes: int) -> float:
        """Operations per second of a product; the operator's own overhead is in it."""
        points = [(m, n, 2 * m * n * n / max(s - self._times.node_s, 1e-8)) for m, n, s in self._times.products]
        return min(on_grid(points, rows, side), self._others.product_rate(rows, side, held_bytes))

    def matmul_rate(self, side: float) -> float:
        """Operations per second of a product of activations."""
        return self._others.matmul_rate(side)

    def conv_rate(self, rows: float, side: float) -> float:
        """Operations per second of a convolution."""
        return self._others.conv_rate(rows, side)


def _family_s(operation: Operation, held_bytes: int, host: OnnxHost | TorchHost) -> float:
    if operation.family == "view":
        return 0.0
    if operation.family == "product":
        rows, inputs, outputs = operation.shape
        lanes = math.ceil(outputs / _LANES) * _LANES
        return 2.0 * rows * inputs * lanes / host.product_rate(rows, math.sqrt(inputs * lanes), held_bytes)
    if operation.family == "matmul":
        rows, inputs, outputs = operation.shape
        return operation.num_flops / host.matmul_rate(math.sqrt(max(rows * max(inputs, outputs), 1)))
    if operation.family == "conv":
        rows, inputs, outputs = operation.shape
        return operation.num_flops / host.conv_rate(rows, math.sqrt(inputs * outputs))
    return host.other_s(operation)


def _timing(run_s: float, node_s: float, cost: BatchCost, seconds: list[float]) -> Timing:
    parts = {"compute": 0.0, "memory": 0.0, "overhead": run_s}
    for operation, operation_s in zip(cost.operations, seconds, strict=True):
        if operation_s <= 2 * node_s:
            parts["overhead"] += operation_s
        elif operation.family in ("product", "matmul", "conv", "function", "norm", "softmax"):
            # A product of few rows waits for its weights.
            is_starved = operation.family == "product" and operation.num_flops < 16 * operation.weight_bytes
            parts["memory" if is_starved else "compute"] += operation_s
        else:
            parts["memory"] += operation_s
    return Timing(run_s + sum(seconds), max(parts, key=parts.__getitem__))
