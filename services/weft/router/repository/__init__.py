"""Graphs as files: found, compiled, checked against what runs, swapped, rolled back."""
