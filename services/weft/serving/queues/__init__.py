"""Queues of requests, by queue policy, and how a model's requests wait in them."""
