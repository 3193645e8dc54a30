"""``retrieval``: embeddings by what a search with them finds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidArgumentError
from weft.optimize.answers import RowAnswers
from weft.optimize.bootstrap import Scores
from weft.optimize.metrics.cosine import unit
from weft.optimize.metrics.metric import MetricOptions, chosen, matrix, vectors
from weft.optimize.rows import DataRows

#: A positive that is ranked behind so many others scores nothing.
_CUTOFF = 10
#: Queries that are compared with all positives at once.
_QUERIES_AT_ONCE = 512


class Retrieval:
    """The score of a row is nDCG@10 of its positive among the positives of all rows, ranked by cosine.

    With one relevant text for each query that is 1 if it comes first, 0.63 if second, 0.5 if third, 0 beyond the tenth
    place. The rows go through the graph twice, as queries and as positives.
    """

    name = "retrieval"
    meaning = "share of the original's nDCG@10 that is lost"

    def __init__(self, options: MetricOptions) -> None:
        self._output = chosen(options, self.name, vectors(options.signature), "a vector of floating-point numbers").name
        inputs = [spec.name for spec in options.signature.inputs if not spec.is_optional]
        if len(inputs) != 1:
            raise InvalidArgumentError(
                f"the metric retrieval needs a graph with one input, '{options.signature.name}' has {len(inputs)}: "
                f"{', '.join(inputs)}"
            )
        self.outputs = (self._output,)
        self.passes = (options.column_of, {**options.column_of, inputs[0]: options.positive})
        self.columns = (options.positive,)

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """As ``AnswerMetric.scores``."""
        first, second = (self._gains(answers) for answers in (original, candidate))
        if not first.any():
            raise InvalidArgumentError("the original finds no positive among the first 10: are they in --positive?")
        return Scores(first, second)

    def _gains(self, answers: Sequence[RowAnswers]) -> NDArray[np.float64]:
        queries, positives = (unit(matrix(one, self._output)) for one in answers)
        ranks = np.empty(len(queries), np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            some = slice(start, start + _QUERIES_AT_ONCE)
            cosines = queries[some] @ positives.T
            own = np.einsum("nd,nd->n", queries[some], positives[some])
            # Equal texts have equal embeddings: neither is before the other.
            ranks[some] = 1 + (cosines > own[:, None] + 1e-9).sum(axis=1)
        gains: NDArray[np.float64] = np.where(ranks <= _CUTOFF, 1 / np.log2(1 + ranks), 0.0)
        return gains
