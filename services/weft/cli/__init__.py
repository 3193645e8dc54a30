"""The ``weft`` command: bring a mesh up, ask a graph, check files."""
