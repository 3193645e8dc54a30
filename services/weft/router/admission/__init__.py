"""How many requests may be in flight: limits of the router, of its graphs and clients, of nodes and steps."""
