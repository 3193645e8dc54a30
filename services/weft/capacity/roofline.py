"""Time of a batch, or of a language model's step, on a device, and what bounds it.

A ``DeviceTarget`` uses data-sheet figures, ``ThisMachine`` measurements.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from weft.capacity.costs import BatchCost, Operation
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.devices import DeviceSpec, find_device
from weft.capacity.machine.profile import (
    ENGINE,
    GPU,
    LINEAR,
    ONNX,
    RESIDENT_BYTES,
    RUNTIMES,
    TORCH,
    MachineProfile,
    Times,
    cpu_model,
    default_file,
)

#: Names of this machine and of its GPU.
THIS, THIS_GPU = "this", "this-gpu"
#: Kernels of a layer of a step on a GPU, where CUDA graphs start them.
_KERNELS_PER_LAYER, _GRAPH_KERNEL_S = 9, 1.3e-6
#: Float32 numbers of a vector register: products compute that many outputs at a time.
_LANES = 16
#: Families of operations that arithmetic bounds; of the others it is memory.
_MULTIPLYING = {"product", "matmul", "conv"}
_COMPUTING = _MULTIPLYING | {"function", "norm", "softmax"}
#: Time of a product of 16-bit numbers by torch on a CPU without instructions for them, over that of float32.
_EMULATION = 60.0


class Timing(NamedTuple):
    """Time of a batch or step, seconds, and its main bound: ``compute``, ``memory`` or ``overhead``."""

    seconds: float
    bound: str


def _timing(seconds: float, parts: Mapping[str, float]) -> Timing:
    return Timing(seconds, max(parts, key=parts.__getitem__))


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
    """Like ``interpolated``, for a rate: constant beyond both ends."""
    return interpolated(points, min(max(x, points[0][0]), points[-1][0]))


def on_grid(points: Iterable[tuple[float, float, float]], x: float, y: float) -> float:
    """The value at ``(x, y)`` of a surface through points ``(x, y, value)`` that form a grid, constant beyond it."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for px, py, value in points:
        rows.setdefault(py, []).append((px, value))
    return level([(py, level(sorted(row), x)) for py, row in sorted(rows.items())], y)


class DeviceTarget:
    """A device by its figures: operations are bound by peak compute or bandwidth, at realistic shares of the peaks."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> DeviceSpec:
        """Figures of the device."""
        return self._spec

    def batch(self, backend: str, num_threads: int, cost: BatchCost) -> Timing:
        """Time of one batch in one instance, without the request around it: the sum of operations, a kernel each.

        ONNX Runtime multiplies float32 as TF32 where a GPU has it.
        """
        device = self._spec
        wide = "tf32" if backend == "onnxruntime" and "tf32" in device.flops_per_s else "fp32"
        parts = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
        total_s = 0.0
        for operation in cost.operations:
            if operation.family == "view":
                continue
            kind = operation.kind
            peak = device.peak(wide if kind == "fp32" else kind)
            if device.is_cpu and backend == "pytorch" and kind in ("bf16", "fp16") and kind not in device.flops_per_s:
                peak /= _EMULATION
            flops_s = operation.num_flops / (peak * device.compute_share)
            moved_s = (operation.weight_bytes + operation.moved_bytes) / (device.bytes_per_s * device.bandwidth_share)
            total_s += max(flops_s, moved_s) + device.kernel_s
            parts["overhead"] += device.kernel_s
            parts["compute" if flops_s > moved_s else "memory"] += max(flops_s, moved_s)
        return _timing(max(total_s, device.kernel_s), parts)

    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        """Time of a step in which each of ``num_sequences`` sequences, ``context`` tokens long, gets one token.

        Weights are read once a step, keys and values of each sequence once.
        """
        flops = num_sequences * (2.0 * (model.num_multiplied + model.num_head) + model.attention_flops(1, context))
        return self._step(model, flops, model.read_bytes(num_sequences) + num_sequences * model.read_kv_bytes(context))

    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        """Time of a step that computes ``num_tokens`` tokens of one prompt, up to ``context``, and samples once."""
        flops = 2.0 * (num_tokens * model.num_multiplied + model.num_head) + model.attention_flops(num_tokens, context)
        return self._step(model, flops, model.read_bytes(num_tokens) + model.read_kv_bytes(context))

    def ridge(self, model: LanguageModel) -> int:
        """Number of sequences from which compute, not reading weights, bounds the products of a decode step."""
        flops_per_row = 2.0 * (model.num_multiplied + model.num_head)
        return max(1, round(model.matrix_bytes / flops_per_row * self._spec.ridge(model.kind)))

    def _step(self, model: LanguageModel, flops: float, moved: float) -> Timing:
        device = self._spec
        compute_s = flops / (device.peak(model.kind) * device.compute_share)
        memory_s = moved / (device.bytes_per_s * device.bandwidth_share)
        overhead_s = 0.0 if device.is_cpu else model.num_layers * _KERNELS_PER_LAYER * _GRAPH_KERNEL_S
        parts = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
        return _timing(max(compute_s, memory_s) + overhead_s, parts)

    def compute_dtype(self, published: str) -> str:
        """The type that the engine computes in for weights of this type: on a CPU float32 if that is faster."""
        return "float32" if self._spec.is_cpu else published

    def runtime_bytes(self, backend: str) -> int:
        """Memory of the service with this backend's libraries, before a model is loaded."""
        return self._spec.runtime_bytes

    def request_s(self, backend: str, moved_bytes: int) -> float:
        """Service time of a request of ``moved_bytes``, without the model, seconds; 0: unknown."""
        return 0.0


class ThisMachine(DeviceTarget):
    """This machine's CPU: measured times of operations and steps, measured when first needed."""

    def __init__(self, profile: MachineProfile) -> None:
        self._profile = profile

    @property
    @override
    def spec(self) -> DeviceSpec:
        """Peaks are those of one thread of ONNX Runtime times the cores."""
        times = self._profile.section(ONNX)
        flops = max(2 * rows * side * side / seconds for rows, side, seconds in times.products)
        moved = max(2.0 * rate for _, rows, rate in times.streamed[-6:] if rows == 1)  # 4 bytes for 2 operations
        return DeviceSpec(
            THIS,
            self._profile.memory_bytes,
            moved,
            {"fp32": flops * self._profile.num_cores},
            is_cpu=True,
            num_cores=self._profile.num_cores,
            compute_share=1.0,
            bandwidth_share=1.0,
            kernel_s=times.node_s,
            runtime_bytes=0,
            source=cpu_model(),
            read=self._profile.measured,
            link="loopback",
        )

    @override
    def batch(self, backend: str, num_threads: int, cost: BatchCost) -> Timing:
        """Of torch, products and an operator's overhead are as measured in torch, all else as in ONNX Runtime."""
        threads = min(num_threads or self._profile.num_cores, self._profile.num_cores)
        times = self._profile.section(ONNX, threads)
        held_bytes = sum(operation.weight_bytes for operation in cost.operations)
        if backend == "onnxruntime":
            run_s, node_s = times.run_s + times.tensor_s * cost.num_tensors, times.node_s
            rates = [(m, n, 2 * m * n * n / seconds) for m, n, seconds in times.products]
            each_s = [max(_operation_s(one, times, rates, held_bytes), node_s) for one in cost.operations]
        else:
            torch = self._profile.section(TORCH, threads)
            run_s, node_s = torch.run_s, torch.node_s
            rates = [(m, n, 2 * m * n * n / max(seconds - node_s, 1e-8)) for m, n, seconds in torch.products]
            shares = [torch.shares.get(one.kind, 1.0) if one.family in _MULTIPLYING else 1.0 for one in cost.operations]
            each_s = [
                node_s + share * _operation_s(one, times, rates, held_bytes)
                for one, share in zip(cost.operations, shares, strict=True)
            ]
        parts = {"compute": 0.0, "memory": 0.0, "overhead": run_s}
        for operation, operation_s in zip(cost.operations, each_s, strict=True):
            # A product of few rows waits for its weights.
            is_starved = operation.family == "product" and operation.num_flops < 16 * operation.weight_bytes
            computes = operation.family in _COMPUTING and not is_starved
            parts["overhead" if operation_s <= 2 * node_s else "compute" if computes else "memory"] += operation_s
        return _timing(run_s + sum(each_s), parts)

    @override
    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        linear = self._profile.section(LINEAR, self._threads(model))
        products_s = self._products_s(model, num_sequences, num_sequences)
        kv_s = num_sequences * model.read_kv_bytes(context) / level(linear.decode, context)
        fixed_s = self._fixed_s(model, num_sequences)
        is_starved = num_sequences < self.ridge(model)
        parts = {"memory": kv_s + (products_s if is_starved else 0), "compute": 0 if is_starved else products_s}
        return _timing(products_s + kv_s + fixed_s, parts | {"overhead": fixed_s})

    @override
    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        linear = self._profile.section(LINEAR, self._threads(model))
        attention_s = model.attention_flops(num_tokens, context) / level(linear.prefill, context)
        compute_s = self._products_s(model, num_tokens, 1) + attention_s
        fixed_s = self._fixed_s(model, 1)
        return _timing(compute_s + fixed_s, {"overhead": fixed_s, "compute": compute_s})

    @override
    def ridge(self, model: LanguageModel) -> int:
        """Rows at which a product reaches half of its largest rate."""
        rates = [(rows, self._rate(model, rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
        return next((rows for rows, rate in rates if rate >= rates[-1][1] / 2), 128)

    @override
    def compute_dtype(self, published: str) -> str:
        products = self._profile.section(LINEAR).products
        kinds = (published, "float32")
        own, wide = ([rate for _, rows, rate in products.get(kind, ()) if rows in (1, 32)] for kind in kinds)
        is_slower = not own or any(a * 1.1 < b for a, b in zip(own, wide, strict=True))
        return "float32" if is_slower else published

    @override
    def runtime_bytes(self, backend: str) -> int:
        if backend == "llm":
            return int(self._profile.section(ENGINE).memory_bytes)
        memory = self._profile.section(RUNTIMES).memory_bytes
        return int(memory.get(backend, memory[""]))

    @override
    def request_s(self, backend: str, moved_bytes: int) -> float:
        runtimes = self._profile.section(RUNTIMES)
        return float(runtimes.request_cpu_s[backend] + runtimes.byte_s * moved_bytes)

    def _threads(self, model: LanguageModel) -> int:
        return min(model.engine.num_threads, self._profile.num_cores)

    def _products_s(self, model: LanguageModel, num_rows: int, num_sampled: int) -> float:
        num_multiplied = num_rows * model.num_multiplied
        # an expert has fewer rows than the step
        rows = num_rows * model.config.num_multiplied / model.config.num_read(num_rows)
        return num_multiplied / self._rate(model, rows) + num_sampled * model.num_head / self._rate(model, num_sampled)

    def _rate(self, model: LanguageModel, num_rows: float) -> float:
        """Weights multiplied per second."""
        products = self._profile.section(LINEAR, self._threads(model)).products
        bits = model.engine.num_bits
        kind = f"int{bits}" if bits else model.engine.dtype
        points = ((rows, num_bytes, rate) for num_bytes, rows, rate in products.get(kind, products["float32"]))
        rate = on_grid(points, num_rows, model.matrix_bytes)
        return rate if kind in products else rate / float(self._profile.section(TORCH).shares.get(model.kind, 1.0))

    def _fixed_s(self, model: LanguageModel, num_sequences: int) -> float:
        engine = self._profile.section(ENGINE, self._threads(model))
        return float(engine.step_s + engine.layer_s * model.num_layers + engine.sequence_s * (num_sequences - 1))


def _operation_s(
    operation: Operation, times: Times, rates: Sequence[tuple[float, float, float]], held_bytes: int
) -> float:
    """Seconds of one operation in a model of so many bytes of weights, by what others of its family and size took.

    Args:
        rates: Of products with a square weight that lies in the caches: rows, side, operations per second.
        held_bytes: Weights beyond the caches are read from memory by every run.
    """
    if operation.family == "view":
        return 0.0
    if operation.family == "product":
        rows, inputs, outputs = operation.shape
        lanes = math.ceil(outputs / _LANES) * _LANES
        side = math.sqrt(inputs * lanes)
        near = on_grid([(m, n, 2 * m * n * n / seconds) for m, n, seconds in times.products], rows, side)
        far: dict[float, list[tuple[float, float]]] = {}
        for num_bytes, num_rows, rate in times.streamed:
            far.setdefault(num_bytes, []).append((num_rows, rate))
        by_bytes = [(num_bytes, min(level(points, rows), near)) for num_bytes, points in sorted(far.items())]
        streamed = level([(RESIDENT_BYTES, near), *by_bytes], max(held_bytes, 1))
        return 2.0 * rows * inputs * lanes / min(streamed, on_grid(rates, rows, side))
    if operation.family == "matmul":
        rows, inputs, outputs = operation.shape
        tiles = [(tile, 2 * tile * tile * 32 / seconds) for tile, seconds in times.matmuls]
        return operation.num_flops / level(tiles, math.sqrt(max(rows * max(inputs, outputs), 1)))
    if operation.family == "conv":
        rows, inputs, outputs = operation.shape
        points = [(m, math.sqrt(a * b), 2 * m * a * b / seconds) for m, a, b, seconds in times.convs]
        return operation.num_flops / on_grid(points, rows, math.sqrt(inputs * outputs))
    family = "copy" if operation.family == "gather" else operation.family
    return interpolated(times.families[family], operation.moved_bytes + operation.weight_bytes)


def find_target(
    name: str, profile_file: Path | None = None, announce: Callable[[str], None] = lambda _: None
) -> DeviceTarget:
    """The device of that name, ``"this"`` machine, ``"this-gpu"``, or the one described by a file.

    Raises:
        NotFoundError, InvalidArgumentError: See ``find_device``.
    """
    if name.lower() not in (THIS, THIS_GPU):
        return DeviceTarget(find_device(name))
    profile = MachineProfile(profile_file or default_file(), announce)
    if name.lower() == THIS:
        return ThisMachine(profile)
    figures = profile.section(GPU)
    spec = DeviceSpec(
        THIS_GPU,
        figures.memory_bytes,
        figures.bytes_per_s,
        figures.flops_per_s,
        compute_share=1.0,  # what was reached is no peak but what good kernels do
        bandwidth_share=1.0,
        kernel_s=figures.kernel_s,
        source=figures.name,
        read=profile.measured,
    )
    return DeviceTarget(spec)
