"""TLS and channel credentials."""
