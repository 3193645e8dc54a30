"""The two ways to answer a request: inference by a graph, or by a model of a target that is called by its own name."""
