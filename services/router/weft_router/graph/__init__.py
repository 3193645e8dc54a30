"""The graph language: from ``graph.pbtxt`` (or an ensemble's ``config.pbtxt``) to a plan that can run.

Entry points::

    compile_graph(source, catalog, graphs) -> GraphPlan        raises GraphError with every diagnostic
    check_graph(source, catalog=None, graphs=None) -> list[Diagnostic]   errors and warnings, never raises
    model_config(source, plan) -> ModelConfig                  the graph as ``ModelConfig`` shows it

``weft_common.pbtxt.render`` turns diagnostics into text. Without a catalog nothing is said about models: names, tensors
and types that depend on them are not checked.
"""

from weft_router.graph.compile import check_graph, compile_graph
from weft_router.graph.parse import model_config
from weft_router.graph.plan import GraphPlan
from weft_router.graph.source import Catalog, GraphError, GraphLookup, GraphSource

__all__ = [
    "Catalog",
    "GraphError",
    "GraphLookup",
    "GraphPlan",
    "GraphSource",
    "check_graph",
    "compile_graph",
    "model_config",
]
