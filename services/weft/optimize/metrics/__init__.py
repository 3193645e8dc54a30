"""Metrics by name; a new one is a module and a line here."""

from collections.abc import Callable, Mapping

from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import suggestion
from weft.optimize.metrics.classifiers import Agreement, LogLoss, classes
from weft.optimize.metrics.cosine import Cosine
from weft.optimize.metrics.metric import AnswerMetric, MetricOptions, vectors
from weft.optimize.metrics.retrieval import Retrieval
from weft.optimize.metrics.user_function import UserFunction

METRICS: Mapping[str, Callable[[MetricOptions], AnswerMetric]] = {
    metric.name: metric for metric in (Agreement, Cosine, LogLoss, Retrieval)
}


def make_metric(name: str, options: MetricOptions) -> AnswerMetric:
    """The metric of a name, or of a ``FILE.py:function``; "" is what suits the graph's outputs.

    Without a name it is ``agreement`` where an output is a class, else ``cosine``.

    Raises:
        InvalidArgumentError: There is none, or it cannot judge the graph.
    """
    if name.partition(":")[2]:
        return UserFunction(options._replace(function=name))
    if not name:
        if not classes(options.signature) and not vectors(options.signature):
            raise InvalidArgumentError(
                f"no output of '{options.signature.name}' is a class or a vector; judge with a function of your own: "
                "--metric FILE.py:function"
            )
        name = Agreement.name if classes(options.signature) else Cosine.name
    if name not in METRICS:
        raise InvalidArgumentError(f"unknown --metric '{name}'{suggestion(name, METRICS)}; or give FILE.py:function")
    return METRICS[name](options)
