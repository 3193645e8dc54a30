"""Commands that call a router, and ``weft key``."""
