"""``weft explain``: the path of a request through a graph, without a server."""

from weft_tools.explain.command import run

__all__ = ["run"]
