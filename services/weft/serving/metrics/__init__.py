"""Prometheus collectors of a serving process."""
