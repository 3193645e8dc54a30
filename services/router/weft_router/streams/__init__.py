"""Graphs with a decoupled step."""
