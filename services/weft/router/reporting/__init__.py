"""What a request did: its path, spans and counters."""
