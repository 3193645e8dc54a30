"""Backends: what runs a model."""
