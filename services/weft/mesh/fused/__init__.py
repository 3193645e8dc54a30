"""The router and model services in one process."""
