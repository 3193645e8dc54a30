"""Which steps run as CUDA graphs, and in what size: plain Python, no torch."""

from bisect import bisect_left
from typing import NamedTuple

#: Sequences of a captured step: few sizes, and little padding in any of them.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class GraphShape(NamedTuple):
    """Shape of a captured step.

    Attributes:
        num_seqs: Sequences, those of padding included.
        q_len: Tokens of each.
    """

    num_seqs: int
    q_len: int


class GraphPolicy:
    """Shapes to capture, and the shape in which a step runs.

    A step is uniform if all its sequences have equally many tokens, and that number is one of ``q_lens``: 1 for
    decodes, 1 and the drafts for decodes with speculation. A uniform step runs in the smallest shape that holds it, the
    rest padded. All others, such as those with a chunk of a prompt, are launched operation by operation.

    Args:
        max_num_seqs: Most sequences of a step.
        q_lens: Tokens of a sequence in a uniform step.

    Attributes:
        shapes: What to capture, the largest first: smaller ones then fit into its memory.
    """

    def __init__(self, max_num_seqs: int, q_lens: tuple[int, ...]) -> None:
        largest = bisect_left(BATCH_SIZES, max_num_seqs)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._q_lens = frozenset(q_lens)
        shapes = [GraphShape(num_seqs, q_len) for num_seqs in self._sizes for q_len in self._q_lens]
        self.shapes = sorted(shapes, key=lambda shape: (shape.num_seqs * shape.q_len, shape), reverse=True)

    def choose(self, num_seqs: int, num_tokens: int, max_q_len: int) -> GraphShape | None:
        """The shape for a step; None: it is not uniform, or has more sequences than any shape.

        Args:
            num_seqs: Sequences of the step, at least 1.
            num_tokens: Tokens of all of them.
            max_q_len: Most tokens of one.
        """
        if max_q_len not in self._q_lens or num_tokens != num_seqs * max_q_len or num_seqs > self._sizes[-1]:
            return None
        return GraphShape(self._sizes[bisect_left(self._sizes, num_seqs)], max_q_len)
