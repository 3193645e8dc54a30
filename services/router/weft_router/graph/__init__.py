"""The graph language: from ``graph.pbtxt`` (or an ensemble's ``config.pbtxt``) to a plan that can run.

Entry points::

    compile_graph(source, catalog, graphs) -> GraphPlan        raises GraphError with every diagnostic
    check_graph(source, catalog=None, graphs=None) -> list[Diagnostic]   errors and warnings, never raises
    model_config(source, plan) -> ModelConfig                  the graph as ``ModelConfig`` shows it

The way of a file through this package::

    source, parse               the text, the message, where everything stands
    check_features, _fields, _limits, _structure, _branches     what is wrong with the file alone
    resolve, names, name_table  targets of steps; which tensor goes where, by name
    scope, types, build_*       types and slots: nodes of every kind, their steps, where tensors are used
    expression, compile_condition, conditions, readings         conditions, from text to what runs
    policies, defaults, streams what holds for a step; its values without an answer; decoupled models
    check_latency, check_amplification                          what the finished plan may cost
    plan                        the result
    report                      collects what is wrong on the way

``weft_common.text.pbtxt.render`` turns diagnostics into text. Without a catalog nothing is said about models: names,
tensors and types that depend on them are not checked.
"""

from weft_router.graph.compiler.compile import check_graph, compile_graph
from weft_router.graph.plan import GraphPlan
from weft_router.graph.syntax.parse import model_config
from weft_router.graph.syntax.source import GraphError, GraphLookup, GraphSource, ModelCatalog

__all__ = [
    "GraphError",
    "GraphLookup",
    "GraphPlan",
    "GraphSource",
    "ModelCatalog",
    "check_graph",
    "compile_graph",
    "model_config",
]
