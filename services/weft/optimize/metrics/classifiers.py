"""``agreement`` and ``loss``: classifiers, compared with labels of the data or with the original."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import INTEGERS
from weft.optimize.answers import RowAnswers
from weft.optimize.bootstrap import Scores
from weft.optimize.metrics.metric import MetricOptions, chosen, is_single, matrix, vectors
from weft.optimize.rows import DataRows

_CLASSES = INTEGERS | {"BOOL", "BYTES"}
#: Least probability that a logarithm is taken of.
_LEAST = 1e-7


def classes(signature: ModelSignature) -> list[TensorSpec]:
    """Outputs that name a class."""
    return [spec for spec in signature.outputs if spec.datatype in _CLASSES and is_single(spec)]


class Agreement:
    """The score of a row is 1 if its class is right, else 0.

    The class is an output of one number, boolean or text; a graph that has none is judged by the largest element of a
    vector. It is right if it is the data's label or, without labels, the original's class.
    """

    name = "agreement"

    def __init__(self, options: MetricOptions) -> None:
        fitting = [*classes(options.signature), *vectors(options.signature)]
        if not options.output:
            fitting = classes(options.signature) or fitting
        self._spec = chosen(options, self.name, fitting, "a class or a vector of scores")
        self._label = options.label
        self.meaning = (
            "share of the original's right answers that is lost" if options.label else "share of rows in another class"
        )
        self.outputs = (self._spec.name,)
        self.passes: Sequence[Mapping[str, str]] = (options.column_of,)
        self.columns = (options.label,) if options.label else ()

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """As ``AnswerMetric.scores``."""
        first, second = (self._classes(answers[0]) for answers in (original, candidate))
        right = [_class(value) for value in rows.columns[self._label]] if self._label else first
        hits = [
            np.array([one == other for one, other in zip(own, right, strict=True)], float) for own in (first, second)
        ]
        if not hits[0].any():
            raise InvalidArgumentError(
                f"no answer of the original is its label in '{self._label}': answers such as '{first[0]}', labels such "
                f"as '{right[0]}'; --label names the column, --output the output"
            )
        return Scores(hits[0].astype(np.float64), hits[1].astype(np.float64))

    def _classes(self, answers: RowAnswers) -> list[str]:
        if self._spec.datatype in _CLASSES:
            values = answers.outputs[self._spec.name]
            return ["" if value is None else _class(np.asarray(value).reshape(-1)[0]) for value in values]
        return [str(index) for index in matrix(answers, self._spec.name).argmax(axis=1)]


def _class(value: Any) -> str:
    """A class as text: 3, 3.0 and "3" are one."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.generic):
        value = value.item()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


class LogLoss:
    """The score of a row is minus its log loss: the logarithm of the probability of the right class.

    Without labels the right classes are those of the original, each with the probability that it gives them. A vector
    that is no distribution is taken for logits.
    """

    name = "loss"

    def __init__(self, options: MetricOptions) -> None:
        self._output = chosen(options, self.name, vectors(options.signature), "a vector of floating-point numbers").name
        self._label = options.label
        self.meaning = "rise of the log loss, in nats (1 % is 0.01)" + (
            "" if options.label else ", against the original"
        )
        self.outputs = (self._output,)
        self.passes: Sequence[Mapping[str, str]] = (options.column_of,)
        self.columns = (options.label,) if options.label else ()

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """As ``AnswerMetric.scores``."""
        first, second = (_probabilities(matrix(answers[0], self._output)) for answers in (original, candidate))
        right = self._labels(rows, first.shape[1]) if self._label else first
        own, other = ((right * np.log(np.maximum(values, _LEAST))).sum(axis=1) for values in (first, second))
        return Scores(own, other, is_relative=False)

    def _labels(self, rows: DataRows, num_classes: int) -> NDArray[np.float64]:
        values = [_class(value) for value in rows.columns[self._label]]
        for value in values:
            if not value.isdecimal() or int(value) >= num_classes:
                raise InvalidArgumentError(
                    f"label '{value}' in '{self._label}' is no class of '{self._output}', which has 0 to "
                    f"{num_classes - 1}"
                )
        return np.eye(num_classes)[[int(value) for value in values]]


def _probabilities(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if (values >= 0).all() and np.allclose(values.sum(axis=1), 1.0, atol=1e-2):
        return values
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares
