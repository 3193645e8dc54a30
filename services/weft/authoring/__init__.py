"""Graphs and models in Python: a function is traced once and yields ``graph.proto``, and nothing else.

``graph.py`` has ``@graph``; ``steps.py`` calls of models, graphs and nodes; ``nodes.py`` the kinds of node and
``@node``; ``expressions.py`` conditions; ``tensors.py`` types; ``models.py`` the signatures of a repository.
``tracing.py`` names tensors, ``message.py`` writes the graph, ``fields.py`` fields of messages, and ``faults.py`` puts
every error on the user's line.
"""
