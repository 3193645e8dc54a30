"""The two ways to answer a request: a graph, or a model of a target called by its own name."""
