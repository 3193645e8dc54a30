"""Generated messages and stubs of the V2 protocol, the model configuration and the graph language.

PYTEST_DONT_REWRITE: see ``weft``.
"""
