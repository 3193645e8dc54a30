"""What a model costs: bytes of its weights, and the work of a batch as a list of operations, whatever its format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of the program.

    Attributes:
        family: Operations whose time depends on the same thing: ``product`` (of a matrix with a weight), ``matmul`` (of
            two activations), ``conv``, ``element`` (an addition and the like), ``function`` (exponentials and the
            like), ``norm``, ``softmax``, ``reduce``, ``transpose``, ``gather``, ``copy``; ``view`` moves nothing.
        num_flops: Floating-point or integer operations; a multiply-add counts as two.
        weight_bytes: Weights that it reads.
        moved_bytes: Activations that it reads and writes.
        kind: Type of what is multiplied: a key of ``TYPE_BYTES``.
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
    """What a batch costs.

    Attributes:
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
            shapes: Dims of inputs without the batch, for those whose declaration leaves some open.

        Raises:
            InvalidArgumentError: A dimension is open, or a shape does not fit.
        """
