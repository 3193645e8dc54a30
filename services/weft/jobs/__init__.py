"""Data sets (``weft batch``) and broker messages (``weft stream``) through a graph. See ``docs/jobs.md``."""
