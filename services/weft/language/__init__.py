"""The graph language: parses, checks and compiles ``graph.pbtxt`` (or an ensemble's ``config.pbtxt``) to a plan.

Entry points are in ``weft.router.compile``, which passes in the node kinds and step policies by name. A file goes
through::

    syntax      parsing: text to messages with source positions; errors are collected in a report; ``KindSyntax`` and
                ``PolicyKind`` are what node kinds and step policies implement
    checks      errors in the file alone; costs of the finished plan
    compiler    resolve, names, name_table: targets of steps, and wiring of tensors by name
                scope, uses, steps, nodes: types and slots, the same for every node kind (``NodeKind``)
    types       conditions (CEL), what they prove about absent tensors; tensor types
    plan        the compiled form of graphs, nodes, steps and policies
    description nodes as words and edges, for drawings and explanations

``weft.base.text.pbtxt.render`` formats diagnostics. Without a catalog of models, checks of their names, tensors and
types are skipped.
"""

from weft.language.plan import GraphPlan
from weft.language.syntax.file import GraphError, GraphLookup, GraphSource, ModelCatalog
from weft.language.syntax.parse import model_config

__all__ = ["GraphError", "GraphLookup", "GraphPlan", "GraphSource", "ModelCatalog", "model_config"]
