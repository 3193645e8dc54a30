"""``FILE.py:function``: a loss that the user computes."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.optimize.answers import RowAnswers
from weft.optimize.bootstrap import Scores
from weft.optimize.metrics.metric import MetricOptions
from weft.optimize.rows import DataRows


class UserFunction:
    """Calls ``function(original, candidate, rows)``, which returns the loss of each row.

    ``original`` and ``candidate`` map the graph's outputs to an array with an entry for each row, ``rows`` the columns
    of the data to lists.
    """

    meaning = "mean of what the function returns"
    outputs: Sequence[str] = ()

    def __init__(self, options: MetricOptions) -> None:
        self.name = options.function
        self._function = _load(options.function)
        self.passes: Sequence[Mapping[str, str]] = (options.column_of,)
        self.columns = (options.label,) if options.label else ()

    def scores(self, original: Sequence[RowAnswers], candidate: Sequence[RowAnswers], rows: DataRows) -> Scores:
        """As ``AnswerMetric.scores``."""
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
