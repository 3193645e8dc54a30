"""The work of a batch as a list of operations, whatever the model's format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

#: Families of operations whose time depends on the same thing:
#: ``product`` matrix product with a weight, ``matmul`` of two activations, ``conv`` a convolution;
#: ``element`` an addition and the like, ``function`` exponentials and the like, ``norm``, ``softmax``, ``reduce``,
#: ``transpose``, ``gather``, ``copy`` as they say; ``view`` moves nothing.
FAMILIES = (
    "product", "matmul", "conv", "element", "function", "norm", "softmax", "reduce", "transpose", "gather", "copy",
    "view",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the program.

    Attributes:
        family: One of ``FAMILIES``.
        num_flops: Floating-point or integer operations; a multiply-add counts as two.
        weight_bytes: Weights that it reads.
        moved_bytes: Activations that it reads and writes.
        kind: Type of what is multiplied: a key of ``TYPE_BYTES``.
        shape: ``(rows, inputs, outputs)`` of a product, of ``count`` of them; else ().
        count: Independent products of that shape.
    """

    family: str
    num_flops: float = 0.0
    weight_bytes: int = 0
    moved_bytes: int = 0
    kind: str = "fp32"
    shape: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What a batch costs.

    Attributes:
        num_rows: Rows of the batch.
        operations: In order.
        peak_bytes: Activations that are in memory at the same time, at most; inputs and outputs included.
        input_bytes, output_bytes: Of the tensors of the request and its answer.
        num_tensors: Inputs and outputs.
    """

    num_rows: int
    operations: tuple[Operation, ...]
    peak_bytes: int
    input_bytes: int
    output_bytes: int
    num_tensors: int = 2

    @property
    def num_flops(self) -> float:
        """Of all operations."""
        return sum(operation.num_flops for operation in self.operations)

    @property
    def moved_bytes(self) -> int:
        """Weights read once and activations read and written."""
        return sum(operation.weight_bytes + operation.moved_bytes for operation in self.operations)


@dataclass(frozen=True, slots=True)
class Weights:
    """Memory of one instance that does not depend on the batch.

    Attributes:
        num_bytes: The weights, as the file has them.
        packed_bytes: Copies of matrices that the runtime lays out for its products on a CPU, beside the weights.
    """

    num_bytes: int
    packed_bytes: int = 0


class CostModel(Protocol):
    """The cost of a model in one format."""

    @property
    def weights(self) -> Weights:
        """Memory that does not depend on the batch."""

    def batch(self, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> BatchCost:
        """What a batch costs.

        Args:
            num_rows: Rows.
            shapes: Dims of inputs without the batch, for those whose declaration leaves some open.

        Raises:
            InvalidArgumentError: A dimension is open, or a shape does not fit.
        """
