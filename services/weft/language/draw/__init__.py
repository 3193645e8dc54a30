"""``weft draw``: pictures of graphs."""

from weft.language.draw.formats import FORMATS

__all__ = ["FORMATS"]
