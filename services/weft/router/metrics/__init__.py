"""Prometheus collectors of the router."""
