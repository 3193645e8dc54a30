"""Limits on requests in flight: of the router, of graphs, clients, nodes and steps."""
