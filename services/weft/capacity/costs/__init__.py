"""Cost of a model in any format: bytes of its weights, and the operations of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the program.

    Attributes:
        family: Operations with similar costs: ``product`` (of a matrix with a weight), ``matmul`` (of two activations),
            ``conv``, ``element`` (an addition and the like), ``function`` (exponentials and the like), ``norm``,
            ``softmax``, ``reduce``, ``transpose``, ``gather``, ``copy``; ``view`` moves nothing.
        num_flops: Floating-point or integer operations; a multiply-add counts as two.
        kind: Type of the multiplied values: a key of ``TYPE_BYTES``.
        shape: ``(rows, inputs, outputs)`` of a product; else ().
    """

    family: str
    num_flops: float = 0.0
    weight_bytes: int = 0
    moved_bytes: int = 0
    kind: str = "fp32"
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Cost of a batch.

    Attributes:
        peak_bytes: Most activations in memory at the same time, inputs and outputs included.
    """

    num_rows: int
    operations: tuple[Operation, ...]
    peak_bytes: int
    input_bytes: int
    output_bytes: int
    num_tensors: int = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """Memory of one instance that does not depend on the batch.

    Attributes:
        packed_bytes: Copies of matrices that the runtime lays out for its products on a CPU.
    """

    num_bytes: int
    packed_bytes: int = 0


class CostModel(Protocol):
    """The cost of a model in one format."""

    @property
    def weights(self) -> Weights:
        """Memory that does not depend on the batch."""

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """Cost of a batch.

        Args:
            shapes: Dims of inputs without the batch, for those with variable dims.

        Raises:
            InvalidArgumentError: A dimension is open, or a shape does not fit.
        """
