"""The gateway as a client of the router."""
