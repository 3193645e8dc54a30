"""``weft draw``: a graph as a picture."""

from weft_cli.draw.command import run

__all__ = ["run"]
