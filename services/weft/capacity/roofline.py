"""How long a batch or a step of a language model takes on a device, and what bounds it."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from typing_extensions import override

from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.costs.operation import BatchCost, Operation
from weft.capacity.devices import DeviceSpec
from weft.capacity.machine.profile import RESIDENT_BYTES, EngineTimes, LinearTimes, Times, TorchTimes


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of a curve through points, sorted by x and above 0; constant below, proportional beyond.

    A time cannot fall below that of the smallest size measured, and beyond the largest grows with the size.
    """
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1]
    if x >= last[0]:
        return last[1] * x / last[0]
    index = bisect.bisect_right([px for px, _ in points], x)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def level(points: Sequence[tuple[float, float]], x: float) -> float:
    """As ``interpolated``, for a rate: constant beyond both ends."""
    return interpolated(points, min(max(x, points[0][0]), points[-1][0]))


def on_grid(points: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    """The value at ``(x, y)`` of a surface through points ``(x, y, value)`` that form a grid, constant beyond it."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for px, py, value in points:
        rows.setdefault(py, []).append((px, value))
    return level([(py, level(sorted(row), x)) for py, row in sorted(rows.items())], y)


class Timing(NamedTuple):
    """Time of a batch.

    Attributes:
        seconds: Of the whole batch.
        bound: ``"compute"``, ``"memory"`` or ``"overhead"``: what most of it goes to.
    """

    seconds: float
    bound: str


class BatchTimer(Protocol):
    """Predicts the time of batches."""

    def batch(self, cost: BatchCost) -> Timing:
        """Time of one batch in one instance, without the request around it."""


class Roofline:
    """Operations bound by peak compute or by bandwidth, each with the share of the peak that good kernels reach.

    Args:
        device: Where it runs.
        kind: Type that float32 products compute in there: ``"tf32"``, ``"fp16"``, ...; "": as they are.
    """

    def __init__(self, device: DeviceSpec, kind: str = "") -> None:
        self._device = device
        self._kind = kind

    def batch(self, cost: BatchCost) -> Timing:
        """The sum of its operations, one kernel each."""
        device = self._device
        compute_s = memory_s = overhead_s = total_s = 0.0
        for operation in cost.operations:
            if operation.family == "view":
                continue
            kind = self._kind if operation.kind == "fp32" and self._kind else operation.kind
            flops_s = operation.num_flops / (device.peak(kind) * device.compute_share)
            moved_s = (operation.weight_bytes + operation.moved_bytes) / (device.bytes_per_s * device.bandwidth_share)
            total_s += max(flops_s, moved_s) + device.kernel_s
            overhead_s += device.kernel_s
            if flops_s > moved_s:
                compute_s += flops_s
            else:
                memory_s += moved_s
        parts = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
        return Timing(max(total_s, device.kernel_s), max(parts, key=parts.__getitem__))


#: Float32 numbers of a vector register: products compute that many outputs at a time.
_LANES = 16


class OnnxHost:
    """ONNX Runtime: what operations of the same family and size took in models made for that.

    Args:
        times: Measured with as many threads as the model will have.
    """

    def __init__(self, times: Times) -> None:
        self._times = times

    def batch(self, cost: BatchCost) -> Timing:
        """Weights beyond the caches are read from memory by every run."""
        run_s = self._times.run_s + self._times.tensor_s * cost.num_tensors
        seconds = [max(each, self._times.node_s) for each in self._operations_s(cost)]
        return _timing(run_s, self._times.node_s, cost, seconds)

    def _operations_s(self, cost: BatchCost) -> list[float]:
        held_bytes = sum(operation.weight_bytes for operation in cost.operations)
        return [self._operation_s(operation, held_bytes) for operation in cost.operations]

    def _operation_s(self, operation: Operation, held_bytes: int) -> float:
        if operation.family == "view":
            return 0.0
        if operation.family == "product":
            rows, inputs, outputs = operation.shape
            lanes = math.ceil(outputs / _LANES) * _LANES
            return 2.0 * rows * inputs * lanes / self._product_rate(rows, math.sqrt(inputs * lanes), held_bytes)
        if operation.family == "matmul":
            rows, inputs, outputs = operation.shape
            rates = [(tile, 2 * tile * tile * 32 / seconds) for tile, seconds in self._times.matmuls]
            return operation.num_flops / level(rates, math.sqrt(max(rows * max(inputs, outputs), 1)))
        if operation.family == "conv":
            rows, inputs, outputs = operation.shape
            points = [(m, math.sqrt(a * b), 2 * m * a * b / seconds) for m, a, b, seconds in self._times.convs]
            return operation.num_flops / on_grid(points, rows, math.sqrt(inputs * outputs))
        family = "copy" if operation.family == "gather" else operation.family
        return interpolated(self._times.families[family], operation.moved_bytes + operation.weight_bytes)

    def _product_rate(self, rows: float, side: float, held_bytes: int) -> float:
        """Operations per second of a product with a weight of this side, in a model of so many bytes of weights."""
        near = on_grid([(m, n, 2 * m * n * n / seconds) for m, n, seconds in self._times.products], rows, side)
        far: dict[float, list[tuple[float, float]]] = {}
        for num_bytes, num_rows, rate in self._times.streamed:
            far.setdefault(num_bytes, []).append((num_rows, rate))
        by_bytes = [(num_bytes, min(level(points, rows), near)) for num_bytes, points in sorted(far.items())]
        return level([(RESIDENT_BYTES, near), *by_bytes], max(held_bytes, 1))


class TorchHost(OnnxHost):
    """Exported programs of torch: products as measured in torch, all else as in ONNX Runtime, and its own overhead.

    Args:
        torch_times: Of torch.
        times: Of ONNX Runtime, for what is no product.
    """

    def __init__(self, torch_times: TorchTimes, times: Times) -> None:
        super().__init__(times)
        self._torch_times = torch_times

    @override
    def batch(self, cost: BatchCost) -> Timing:
        node_s = self._torch_times.node_s
        return _timing(self._torch_times.run_s, node_s, cost, [node_s + each for each in self._operations_s(cost)])

    @override
    def _product_rate(self, rows: float, side: float, held_bytes: int) -> float:
        """The operator's own overhead is counted apart."""
        node_s = self._torch_times.node_s
        points = [(m, n, 2 * m * n * n / max(s - node_s, 1e-8)) for m, n, s in self._torch_times.products]
        return min(on_grid(points, rows, side), super()._product_rate(rows, side, held_bytes))


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


#: Kernels of a layer of a step on a GPU, where CUDA graphs start them.
_KERNELS_PER_LAYER, _GRAPH_KERNEL_S = 9, 1.3e-6


class StepTimer(Protocol):
    """Predicts the time of a step."""

    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        """A step in which each of so many sequences, ``context`` tokens long, gets one token."""

    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        """A step that computes ``num_tokens`` tokens of one prompt, the last of ``context``, and samples once."""

    def ridge(self, model: LanguageModel) -> int:
        """Sequences from which the products of a decode step are bound by compute, not by the weights' bytes."""


@dataclass(frozen=True)
class LanguageRoofline(StepTimer):
    """On a device: weights are read once a step, keys and values of each sequence once."""

    device: DeviceSpec

    @override
    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        flops = num_sequences * (2.0 * (model.num_multiplied + model.num_head) + model.attention_flops(1, context))
        moved = model.matrix_bytes + num_sequences * model.read_kv_bytes(context)
        return self._timing(model, flops, moved)

    @override
    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        flops = 2.0 * (num_tokens * model.num_multiplied + model.num_head) + model.attention_flops(num_tokens, context)
        return self._timing(model, flops, model.matrix_bytes + model.read_kv_bytes(context))

    @override
    def ridge(self, model: LanguageModel) -> int:
        flops_per_row = 2.0 * (model.num_multiplied + model.num_head)
        return max(1, round(model.matrix_bytes / flops_per_row * self.device.ridge(model.kind)))

    def _timing(self, model: LanguageModel, flops: float, moved: float) -> Timing:
        device = self.device
        compute_s = flops / (device.peak(model.kind) * device.compute_share)
        memory_s = moved / (device.bytes_per_s * device.bandwidth_share)
        overhead_s = 0.0 if device.is_cpu else model.config.num_layers * _KERNELS_PER_LAYER * _GRAPH_KERNEL_S
        parts = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
        return Timing(max(compute_s, memory_s) + overhead_s, max(parts, key=parts.__getitem__))


@dataclass(frozen=True)
class LanguageHost(StepTimer):
    """On this CPU: what products, attention and steps took in models made for that."""

    products: LinearTimes
    engine: EngineTimes

    @override
    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        products_s = self._products_s(model, num_sequences, num_sequences)
        kv_s = num_sequences * model.read_kv_bytes(context) / level(self.products.decode, context)
        fixed_s = self._fixed_s(model, num_sequences)
        is_starved = num_sequences < self.ridge(model)
        parts = {"memory": kv_s + (products_s if is_starved else 0), "compute": 0 if is_starved else products_s}
        parts["overhead"] = fixed_s
        return Timing(products_s + kv_s + fixed_s, max(parts, key=parts.__getitem__))

    @override
    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        products_s = self._products_s(model, num_tokens, 1)
        attention_s = model.attention_flops(num_tokens, context) / level(self.products.prefill, context)
        fixed_s = self._fixed_s(model, 1)
        return Timing(
            products_s + attention_s + fixed_s, "compute" if products_s + attention_s > fixed_s else "overhead"
        )

    @override
    def ridge(self, model: LanguageModel) -> int:
        """Rows at which a product reaches half of its largest rate."""
        rates = [(rows, self._rate(model, rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
        return next((rows for rows, rate in rates if rate >= rates[-1][1] / 2), 128)

    def _products_s(self, model: LanguageModel, num_rows: int, num_sampled: int) -> float:
        body_s = num_rows * model.num_multiplied / self._rate(model, num_rows)
        return body_s + num_sampled * model.num_head / self._rate(model, num_sampled)

    def _rate(self, model: LanguageModel, num_rows: int) -> float:
        """Weights multiplied per second."""
        points: dict[float, list[tuple[float, float]]] = {}
        bits = model.engine.num_bits
        kind = f"int{bits}" if bits else model.engine.dtype
        for num_bytes, rows, rate in self.products.products.get(kind, self.products.products["float32"]):
            points.setdefault(num_bytes, []).append((rows, rate))
        by_bytes = [(num_bytes, level(rates, num_rows)) for num_bytes, rates in sorted(points.items())]
        return level(by_bytes, model.matrix_bytes)

    def _fixed_s(self, model: LanguageModel, num_sequences: int) -> float:
        engine = self.engine
        return engine.step_s + engine.layer_s * model.config.num_layers + engine.sequence_s * (num_sequences - 1)
