"""Smaller and faster versions of a model, written only if an accuracy gate passes them. See ``docs/optimize.md``."""
