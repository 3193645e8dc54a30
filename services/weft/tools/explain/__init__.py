"""``weft explain``: the possible paths of a request through a graph, without a server."""
