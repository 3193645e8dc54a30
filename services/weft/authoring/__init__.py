"""Graphs and models in Python: written, run, tested and served from there."""
