"""Where a rank is among the ranks of a model. Imports no torch."""

from typing import NamedTuple


class ParallelSizes(NamedTuple):
    """How many ways each of three axes divides a model.

    Attributes:
        tensor: Ranks that each have some heads, columns and experts of every layer.
        pipeline: Stages that each have some of the layers.
        context: Ranks that each compute some of a prompt's tokens.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes of a model."""
        return self.tensor * self.pipeline * self.context


class Place(NamedTuple):
    """A rank's index along each axis. Tensor ranks, which talk most, have neighbouring numbers."""

    tensor: int = 0
    stage: int = 0
    context: int = 0

    @classmethod
    def of(cls, rank: int, sizes: ParallelSizes) -> "Place":
        """The place of ``rank``, 0 to ``sizes.num_ranks - 1``."""
        others, tensor = divmod(rank, sizes.tensor)
        stage, context = divmod(others, sizes.context)
        return cls(tensor, stage, context)

    def rank(self, sizes: ParallelSizes) -> int:
        """The number of the rank at this place."""
        return (self.stage * sizes.context + self.context) * sizes.tensor + self.tensor
