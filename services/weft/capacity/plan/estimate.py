"""What one model needs on one device, and what it achieves there."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.capacity.roofline.timing import Timing


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a model with all its instances, bytes.

    Attributes:
        runtime: Of the service and its libraries, once for all models of a backend.
        weights: With the copies that the runtime packs.
        activations: Of the largest batch, all at the same time.
        arena: What the allocator takes beyond them.
        kv: Keys and values of language models.
    """

    runtime: int
    weights: int
    activations: int = 0
    arena: int = 0
    kv: int = 0

    @property
    def own(self) -> int:
        """Without the runtime."""
        return self.weights + self.activations + self.arena + self.kv

    @property
    def total(self) -> int:
        """All of it."""
        return self.runtime + self.own


@dataclass(frozen=True)
class Estimate:
    """A model on a device.

    Attributes:
        model, backend, device: Names.
        num_instances: That ``memory`` is of.
        memory: None: it cannot be known.
        unit: What ``rate_per_s`` counts: ``"requests"`` of one row, or ``"tokens"``.
        max_batch: Rows, or sequences, of ``time_max``.
        time_1, time_max: Of a batch of one and of the largest; of language models a step of decoding.
        ridge_batch: Batch from which compute, not memory, bounds the time; None: at none.
        largest_batch: Rows, or sequences of ``context`` tokens, that the memory of the device holds.
        context, largest_context: Tokens of a sequence: as planned for, and that fit; of language models.
        prefill_per_s: Tokens of prompts per second; of language models.
        rate_per_s: What one instance does.
        requests_per_s: Requests of one instance: of one row, or of a prompt and its answer.
        cost_per_million: Of requests or tokens, in the currency of ``--cost-per-hour``.
        missing_bytes: By how much the model does not fit into the device; 0: it fits.
        notes: What the reader should know.
        fault: Why nothing could be estimated, although it could be asked for; "": nothing is wrong.
    """

    model: str
    backend: str
    device: str
    num_instances: int
    memory: MemoryUse | None = None
    unit: str = "requests"
    max_batch: int = 1
    time_1: Timing | None = None
    time_max: Timing | None = None
    ridge_batch: int | None = None
    largest_batch: int = 0
    context: int = 0
    largest_context: int = 0
    prefill_per_s: float = 0.0
    rate_per_s: float = 0.0
    requests_per_s: float = 0.0
    cost_per_million: float | None = None
    missing_bytes: int = 0
    notes: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class Assumptions:
    """What the user gives.

    Attributes:
        batch: Largest batch; 0: that of each configuration.
        shapes: Dims of inputs by name, for dimensions that configurations leave open.
        context: Tokens of a sequence of language models, prompt and answer; 0: a quarter of what the model can have.
        num_output_tokens: Of them, the answer's.
        cost_per_hour: Of the device; 0: unknown.
    """

    batch: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    context: int = 0
    num_output_tokens: int = 128
    cost_per_hour: float = 0.0


def cost_per_million(cost_per_hour: float, rate_per_s: float) -> float | None:
    """Of a million of what a device does at this rate; None where either is unknown."""
    return cost_per_hour / 3600 / rate_per_s * 1e6 if cost_per_hour and rate_per_s else None
