"""``weft draw``: pictures of graphs."""

from weft.tools.draw.formats import FORMATS

__all__ = ["FORMATS"]
