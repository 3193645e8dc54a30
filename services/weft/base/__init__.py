"""Shared foundation of all services: errors, tensors, V2 servicer and client, telemetry, server bootstrap."""
