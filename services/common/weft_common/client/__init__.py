"""Calls of other services: channels, and unary calls that travel together in one stream."""
