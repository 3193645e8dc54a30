"""``cosine``: embeddings, compared with the original's."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.optimize.answers import RowAnswers
from weft.optimize.bootstrap import Scores
from weft.optimize.metrics.metric import MetricOptions, chosen, matrix, vectors
from weft.optimize.rows import DataRows


class Cosine:
    """The score of a row is the cosine of the angle between both embeddings; the original's own is 1."""

    name = "cosine"
    meaning = "1 - mean cosine of the embeddings with the original's"
    columns: Sequence[str] = ()

    def __init__(self, options: MetricOptions) -> None:
        self._output = chosen(options, self.name, vectors(options.signature), "a vector of floating-point numbers").name
        self.outputs = (self._output,)
        self.passes: Sequence[Mapping[str, str]] = (options.column_of,)

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """As ``AnswerMetric.scores``."""
        first, second = (unit(matrix(answers[0], self._output)) for answers in (original, candidate))
        cosines = np.einsum("nd,nd->n", first, second)
        # Two vectors of length 0 are the same.
        cosines[~first.any(axis=1) & ~second.any(axis=1)] = 1.0
        return Scores(np.ones(len(cosines)), np.minimum(cosines, 1.0))


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row scaled to length 1; rows of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths != 0)
    return scaled
