"""Walks a request through a graph of model services."""
