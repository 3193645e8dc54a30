"""Tools that work on files: check, draw, explain, convert, lock; and the frames of ``weft top``."""
