"""Shapes and rows of the tensors that pass through."""
