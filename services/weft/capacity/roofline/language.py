"""Time of a step of the language-model engine: decode and prefill, on a device's roofline or on this CPU."""

from dataclasses import dataclass
from typing import Protocol

from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.devices.device import DeviceSpec
from weft.capacity.machine.profile import EngineTimes, LinearTimes
from weft.capacity.roofline.curves import level
from weft.capacity.roofline.timing import Timing

#: Kernels of a layer of a step on a GPU, where CUDA graphs start them.
_KERNELS_PER_LAYER, _GRAPH_KERNEL_S = 9, 1.3e-6
_MAX_RIDGE = 1 << 20


class StepTimer(Protocol):
    """Predicts the time of a step."""

    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        """A step in which each of so many sequences, ``context`` tokens long, gets one token."""

    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        """A step that computes ``num_tokens`` tokens of one prompt, the last of ``context``, and samples once."""

    def ridge(self, model: LanguageModel) -> int:
        """Sequences from which the products of a decode step are bound by compute, not by the weights' bytes."""


@dataclass(frozen=True)
class LanguageRoofline:
    """On a device: weights are read once a step, keys and values of each sequence once."""

    device: DeviceSpec

    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        """See ``StepTimer``."""
        flops = num_sequences * (2.0 * (model.num_multiplied + model.num_head) + model.attention_flops(1, context))
        moved = model.matrix_bytes + num_sequences * model.read_kv_bytes(context)
        return self._timing(model, flops, moved)

    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        """See ``StepTimer``."""
        flops = 2.0 * (num_tokens * model.num_multiplied + model.num_head) + model.attention_flops(num_tokens, context)
        return self._timing(model, flops, model.matrix_bytes + model.read_kv_bytes(context))

    def ridge(self, model: LanguageModel) -> int:
        """See ``StepTimer``."""
        flops_per_row = 2.0 * (model.num_multiplied + model.num_head)
        return max(1, round(model.matrix_bytes / flops_per_row * self.device.ridge(self._kind(model))))

    def _timing(self, model: LanguageModel, flops: float, moved: float) -> Timing:
        device = self.device
        compute_s = flops / (device.peak(self._kind(model)) * device.compute_share)
        memory_s = moved / (device.bytes_per_s * device.bandwidth_share)
        overhead_s = 0.0 if device.is_cpu else model.config.num_layers * _KERNELS_PER_LAYER * _GRAPH_KERNEL_S
        parts = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
        return Timing(max(compute_s, memory_s) + overhead_s, max(parts, key=parts.__getitem__))

    def _kind(self, model: LanguageModel) -> str:
        return model.kind


@dataclass(frozen=True)
class LanguageHost:
    """On this CPU: what products, attention and steps took in models made for that."""

    products: LinearTimes
    engine: EngineTimes

    def decode(self, model: LanguageModel, num_sequences: int, context: int) -> Timing:
        """See ``StepTimer``."""
        products_s = self._products_s(model, num_sequences, num_sequences)
        kv_s = num_sequences * model.read_kv_bytes(context) / level(self.products.decode, context)
        fixed_s = self._fixed_s(model, num_sequences)
        is_starved = num_sequences < self.ridge(model)
        parts = {"memory": kv_s + (products_s if is_starved else 0), "compute": 0 if is_starved else products_s}
        parts["overhead"] = fixed_s
        return Timing(products_s + kv_s + fixed_s, max(parts, key=parts.__getitem__))

    def prefill(self, model: LanguageModel, num_tokens: int, context: int) -> Timing:
        """See ``StepTimer``."""
        products_s = self._products_s(model, num_tokens, 1)
        attention_s = model.attention_flops(num_tokens, context) / level(self.products.prefill, context)
        fixed_s = self._fixed_s(model, 1)
        return Timing(
            products_s + attention_s + fixed_s, "compute" if products_s + attention_s > fixed_s else "overhead"
        )

    def ridge(self, model: LanguageModel) -> int:
        """See ``StepTimer``: rows at which a product reaches half of its largest rate."""
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
