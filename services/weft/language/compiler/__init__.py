"""Compiles a parsed graph to an immutable plan: names, scopes, steps, nodes."""
