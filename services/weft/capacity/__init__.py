"""What a model needs, where it fits and what it costs (``weft plan``); the best settings (``weft tune``).

See ``docs/capacity.md``.
"""
