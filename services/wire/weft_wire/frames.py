"""Frames of HTTP/2 (RFC 9113, sections 4 and 6): layouts, builders, constants."""
