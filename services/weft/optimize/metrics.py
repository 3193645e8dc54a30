"""Metrics: scores for each row from the answers of two versions. A new one is a class and a line in ``METRICS``."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import FLOATS, INTEGERS
from weft.base.text.suggestion import suggestion
from weft.optimize.gate import Scores
from weft.optimize.rows import DataRows, RowAnswers

_CLASSES = INTEGERS | {"BOOL", "BYTES"}
_A_VECTOR = "a vector of floating-point numbers"
#: Least probability that a logarithm is taken of.
_LEAST = 1e-7
#: A positive that is ranked behind so many others scores nothing.
_CUTOFF = 10
#: Queries that are compared with all positives at once.
_QUERIES_AT_ONCE = 512


class MetricOptions(NamedTuple):
    """Options of a metric.

    Attributes:
        signature: Of the graph whose answers are judged.
        column_of: Column of an input, if named differently.
        output: Judged output of the graph; "": the only one that the metric can judge.
        label: Column with the right answers; "": none, the original's answers are right.
        positive: Column with the texts to find; for ``retrieval``.
    """

    signature: ModelSignature
    column_of: Mapping[str, str]
    output: str = ""
    label: str = ""
    positive: str = "positive"


class AnswerMetric(ABC):
    """A comparison of answers.

    Attributes:
        name: As the user gives it.
        meaning: What a loss means, in one line.
        outputs: Outputs of the graph that it reads; none: all.
        passes: Passes of the rows through the graph: for each, the columns of inputs that are named differently.
        columns: Columns that it reads besides those of inputs.
    """

    name: str
    meaning: str
    outputs: Sequence[str] = ()
    columns: Sequence[str] = ()

    def __init__(self, options: MetricOptions) -> None:
        self.passes: Sequence[Mapping[str, str]] = (options.column_of,)

    @abstractmethod
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """A score for each row, the higher the better.

        Args:
            original: Answers of the original, one for each pass; all have the same rows.
            candidate: Of the candidate, with the same rows.
            rows: These rows of the data.

        Raises:
            InvalidArgumentError: The answers, or the data, are not what the metric compares.
        """


class Agreement(AnswerMetric):
    """The score of a row is 1 if its class is right, else 0.

    The class is an output of one number, boolean or text; a graph that has none is judged by the largest element of a
    vector. It is right if it is the data's label or, without labels, the original's class.
    """

    name = "agreement"

    def __init__(self, options: MetricOptions) -> None:
        super().__init__(options)
        fitting = [*_classes(options.signature), *_vectors(options.signature)]
        if not options.output:
            fitting = _classes(options.signature) or fitting
        self._spec = _chosen(options, self.name, fitting, "a class or a vector of scores")
        self._label = options.label
        self.meaning = (
            "share of the original's right answers that is lost" if options.label else "share of rows in another class"
        )
        self.outputs = (self._spec.name,)
        self.columns = (options.label,) if options.label else ()

    @override
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        first, second = (self._answered(answers[0]) for answers in (original, candidate))
        right = [_class(value) for value in rows.columns[self._label]] if self._label else first
        own, other = (
            np.array([one == right_one for one, right_one in zip(given, right, strict=True)], np.float64)
            for given in (first, second)
        )
        if not own.any():
            raise InvalidArgumentError(
                f"no answer of the original is its label in '{self._label}': answers such as '{first[0]}', labels such "
                f"as '{right[0]}'; --label names the column, --output the output"
            )
        return Scores(own, other)

    def _answered(self, answers: RowAnswers) -> list[str]:
        if self._spec.datatype in _CLASSES:
            values = answers.outputs[self._spec.name]
            return ["" if value is None else _class(np.asarray(value).reshape(-1)[0]) for value in values]
        return [str(index) for index in _matrix(answers, self._spec.name).argmax(axis=1)]


class _VectorMetric(AnswerMetric):
    def __init__(self, options: MetricOptions) -> None:
        super().__init__(options)
        self._output = _chosen(options, self.name, _vectors(options.signature), _A_VECTOR).name
        self.outputs = (self._output,)


class LogLoss(_VectorMetric):
    """The score of a row is minus its log loss: the logarithm of the probability of the right class.

    Without labels the right classes are those of the original, each with the probability that it gives them. A vector
    that is no distribution is taken for logits.
    """

    name = "loss"

    def __init__(self, options: MetricOptions) -> None:
        super().__init__(options)
        self._label = options.label
        against = "" if options.label else ", against the original"
        self.meaning = f"rise of the log loss, in nats (1 % is 0.01){against}"
        self.columns = (options.label,) if options.label else ()

    @override
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        first, second = (_probabilities(_matrix(answers[0], self._output)) for answers in (original, candidate))
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


class Cosine(_VectorMetric):
    """The score of a row is the cosine of the angle between both embeddings; the original's own is 1."""

    name = "cosine"
    meaning = "1 - mean cosine of the embeddings with the original's"

    @override
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        first, second = (_unit(_matrix(answers[0], self._output)) for answers in (original, candidate))
        cosines = np.einsum("nd,nd->n", first, second)
        # Two vectors of length 0 are the same.
        cosines[~first.any(axis=1) & ~second.any(axis=1)] = 1.0
        return Scores(np.ones(len(cosines)), np.minimum(cosines, 1.0))


class Retrieval(_VectorMetric):
    """The score of a row is nDCG@10 of its positive among the positives of all rows, ranked by cosine.

    With one relevant text for each query that is 1 if it comes first, 0.63 if second, 0.5 if third, 0 beyond the tenth
    place. The rows go through the graph twice, as queries and as positives.
    """

    name = "retrieval"
    meaning = "share of the original's nDCG@10 that is lost"

    def __init__(self, options: MetricOptions) -> None:
        super().__init__(options)
        inputs = [spec.name for spec in options.signature.inputs if not spec.is_optional]
        if len(inputs) != 1:
            raise InvalidArgumentError(
                f"the metric retrieval needs a graph with one input, '{options.signature.name}' has {len(inputs)}: "
                f"{', '.join(inputs)}"
            )
        self.passes = (options.column_of, {**options.column_of, inputs[0]: options.positive})
        self.columns = (options.positive,)

    @override
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        first, second = (self._gains(answers) for answers in (original, candidate))
        if not first.any():
            raise InvalidArgumentError("the original finds no positive among the first 10: are they in --positive?")
        return Scores(first, second)

    def _gains(self, answers: Sequence[RowAnswers]) -> NDArray[np.float64]:
        queries, positives = (_unit(_matrix(one, self._output)) for one in answers)
        ranks = np.empty(len(queries), np.int64)
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            some = slice(start, start + _QUERIES_AT_ONCE)
            cosines = queries[some] @ positives.T
            own = np.einsum("nd,nd->n", queries[some], positives[some])
            # Equal texts have equal embeddings: neither is before the other.
            ranks[some] = 1 + (cosines > own[:, None] + 1e-9).sum(axis=1)
        gains: NDArray[np.float64] = np.where(ranks <= _CUTOFF, 1 / np.log2(1 + ranks), 0.0)
        return gains


class UserFunction(AnswerMetric):
    """Calls ``function(original, candidate, rows)`` of ``FILE.py:function``, which returns the loss of each row.

    ``original`` and ``candidate`` map the graph's outputs to an array with an entry for each row, ``rows`` the columns
    of the data to lists.
    """

    meaning = "mean of what the function returns"

    def __init__(self, name: str, options: MetricOptions) -> None:
        super().__init__(options)
        self.name = name
        self._function = _load(name)
        self.columns = (options.label,) if options.label else ()

    @override
    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        try:
            returned = self._function(dict(original[0].outputs), dict(candidate[0].outputs), dict(rows.columns))
            losses = np.asarray(returned, np.float64)
        except Exception as error:
            raise InvalidArgumentError(f"--metric {self.name} failed: {type(error).__name__}: {error}") from error
        if losses.shape != (len(rows),):
            raise InvalidArgumentError(
                f"--metric {self.name} must return a loss for each of {len(rows)} rows, got an array of shape "
                f"{list(losses.shape)}"
            )
        return Scores(np.zeros(len(losses)), -losses, is_relative=False)


METRICS: Mapping[str, Callable[[MetricOptions], AnswerMetric]] = {
    metric.name: metric for metric in (Agreement, Cosine, LogLoss, Retrieval)
}


def make_metric(name: str, options: MetricOptions) -> AnswerMetric:
    """The metric of a name, or of a ``FILE.py:function``.

    Without a name it is ``agreement`` where an output is a class, else ``cosine``.

    Raises:
        InvalidArgumentError: No such metric, or it does not suit the graph.
    """
    if name.partition(":")[2]:
        return UserFunction(name, options)
    if not name:
        if not _classes(options.signature) and not _vectors(options.signature):
            raise InvalidArgumentError(
                f"no output of '{options.signature.name}' is a class or a vector; judge with a function of your own: "
                "--metric FILE.py:function"
            )
        name = Agreement.name if _classes(options.signature) else Cosine.name
    if name not in METRICS:
        raise InvalidArgumentError(f"unknown --metric '{name}'{suggestion(name, METRICS)}; or give FILE.py:function")
    return METRICS[name](options)


def _chosen(options: MetricOptions, metric: str, fitting: Sequence[TensorSpec], what: str) -> TensorSpec:
    """The output that the metric reads."""
    names = ", ".join(spec.name for spec in fitting)
    if options.output:
        for spec in fitting:
            if spec.name == options.output:
                return spec
        raise InvalidArgumentError(
            f"--output '{options.output}' of '{options.signature.name}' is not {what}, which {metric} judges; "
            f"{f'use one of {names}' if names else 'there is none; give another --metric'}"
        )
    if not fitting:
        raise InvalidArgumentError(
            f"no output of '{options.signature.name}' is {what}, which {metric} judges; give another --metric"
        )
    if len(fitting) > 1:
        raise InvalidArgumentError(
            f"'{options.signature.name}' has several outputs to judge: {names}; choose by --output"
        )
    return fitting[0]


def _classes(signature: ModelSignature) -> list[TensorSpec]:
    return [spec for spec in signature.outputs if spec.datatype in _CLASSES and _is_single(spec)]


def _vectors(signature: ModelSignature) -> list[TensorSpec]:
    return [spec for spec in signature.outputs if spec.datatype in FLOATS and not _is_single(spec)]


def _is_single(spec: TensorSpec) -> bool:
    """Whether it has one element per row."""
    return all(dim == 1 for dim in spec.dims)


def _class(value: Any) -> str:
    """A class as text: 3, 3.0 and "3" are equal."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.generic):
        value = value.item()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _matrix(answers: RowAnswers, output: str) -> NDArray[np.float64]:
    """An output as one vector per row, ``[num_rows, num_elements]``."""
    values: Any = answers.outputs[output]
    if not isinstance(values, np.ndarray):
        raise InvalidArgumentError(
            f"output '{output}' has different shapes from row to row, or is missing in some; choose another --output, "
            "or judge with a function of your own: --metric FILE.py:function"
        )
    return values.reshape(len(values), -1).astype(np.float64)


def _probabilities(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if (values >= 0).all() and np.allclose(values.sum(axis=1), 1.0, atol=1e-2):
        return values
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row scaled to length 1; rows of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths != 0)
    return scaled


def _load(reference: str) -> Callable[..., Any]:
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not name.isidentifier() or file.suffix != ".py" or not file.is_file():
        raise InvalidArgumentError(
            f"--metric '{reference}' is not of the form FILE.py:function, or there is no such file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"--metric '{reference}': {file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidArgumentError(f"--metric '{reference}': {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidArgumentError(f"--metric '{reference}': {file} has no function '{name}'")
    return function  # type: ignore[no-any-return]
