"""The graph language: what a ``graph.pbtxt`` (or an ensemble's ``config.pbtxt``) says, and how a plan is made of it.

``weft.router.compile`` has the entry points; it hands in the kinds of node and the policies of steps by name. The way
of a file::

    syntax      the text, the message, where everything stands; what is wrong is collected in a report; what a kind of
                node (``KindSyntax``) or a policy of steps (``PolicyKind``) is in a file
    checks      what is wrong with the file alone, and what the finished plan may cost
    compiler    resolve, names, name_table: targets of steps; which tensor goes where, by name
                scope, uses, steps, nodes: types and slots, the same for every kind of node (``NodeKind``)
    types       conditions, from text to what runs; what they prove; signatures
    plan        what a graph, a node, a step, and a policy of it, such as a retry, are compiled to
    description a node in words and edges, for drawings and explanations

``weft.base.text.pbtxt.render`` turns diagnostics into text. Without a catalog nothing is said about models: names,
tensors and types that depend on them are not checked.
"""

from weft.language.plan import GraphPlan
from weft.language.syntax.file import GraphError, GraphLookup, GraphSource, ModelCatalog
from weft.language.syntax.parse import model_config

__all__ = ["GraphError", "GraphLookup", "GraphPlan", "GraphSource", "ModelCatalog", "model_config"]
