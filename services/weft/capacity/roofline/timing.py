"""How long a batch takes, and why."""

from typing import NamedTuple, Protocol

from weft.capacity.costs.operation import BatchCost, Weights
from weft.capacity.devices.device import DeviceSpec


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

    def batch(self, cost: BatchCost, weights: Weights) -> Timing:
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

    def batch(self, cost: BatchCost, weights: Weights) -> Timing:  # weights are in the operations
        """See ``BatchTimer``."""
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
