"""The path of a request through a graph, without a server."""
