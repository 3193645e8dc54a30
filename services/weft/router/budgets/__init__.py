"""What all requests of a router share: retries and shadow copies."""
