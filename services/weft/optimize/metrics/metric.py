"""What a metric is: from the answers of two versions to a score for each row."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import FLOATS
from weft.optimize.answers import RowAnswers
from weft.optimize.bootstrap import Scores
from weft.optimize.rows import DataRows


class MetricOptions(NamedTuple):
    """What a metric is told.

    Attributes:
        signature: Of the graph whose answers are judged.
        column_of: Column of an input, where it has another name.
        output: Of the graph, that is judged; "": the only one that the metric can judge.
        label: Column of the data with the right answer; "": there is none, the original's answer is right.
        positive: Column with the text that should be found; of ``retrieval``.
        function: ``FILE.py:function``; of a user's function.
    """

    signature: ModelSignature
    column_of: Mapping[str, str]
    output: str = ""
    label: str = ""
    positive: str = "positive"
    function: str = ""


class AnswerMetric(Protocol):
    """How answers are compared."""

    @property
    def name(self) -> str:
        """As the user gives it."""
        ...

    @property
    def meaning(self) -> str:
        """What a loss is, in one line."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Outputs of the graph that it reads; none: all."""
        ...

    @property
    def passes(self) -> Sequence[Mapping[str, str]]:
        """How often the rows go through the graph: for each pass the column of an input that has another name."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """Columns that it reads beside those of inputs."""
        ...

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """A score for each row, the higher the better.

        Args:
            original: Answers of the original, one for each pass; all have the same rows.
            candidate: Of the candidate, with the same rows.
            rows: These rows of the data.

        Raises:
            InvalidArgumentError: The answers, or the data, are not what the metric compares.
        """
        ...


def chosen(options: MetricOptions, metric: str, fitting: Sequence[TensorSpec], what: str) -> TensorSpec:
    """The output that is judged.

    Raises:
        InvalidArgumentError: None fits, several do and none is chosen, or the chosen one does not.
    """
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


def vectors(signature: ModelSignature) -> list[TensorSpec]:
    """Outputs of several floating-point numbers."""
    return [spec for spec in signature.outputs if spec.datatype in FLOATS and not is_single(spec)]


def is_single(spec: TensorSpec) -> bool:
    """Whether it has one element a row."""
    return all(dim == 1 for dim in spec.dims)


def matrix(answers: RowAnswers, output: str) -> NDArray[np.float64]:
    """An output as one vector a row, shape ``[num_rows, num_elements]``.

    Raises:
        InvalidArgumentError: Rows have different shapes, or lack the output.
    """
    values: Any = answers.outputs[output]
    if not isinstance(values, np.ndarray):
        raise InvalidArgumentError(
            f"output '{output}' has different shapes from row to row, or is missing in some; choose another --output, "
            "or judge with a function of your own: --metric FILE.py:function"
        )
    return values.reshape(len(values), -1).astype(np.float64)
