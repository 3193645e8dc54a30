"""``weft draw``: a graph as a picture."""

from weft_tools.draw.command import run

__all__ = ["run"]
