"""Clients of other services: channels, the V2 client, multiplexed unary calls."""
