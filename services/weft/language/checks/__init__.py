"""Checks of a parsed graph that need no models."""
