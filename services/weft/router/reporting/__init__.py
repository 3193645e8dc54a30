"""Reports on requests: path, spans and counters."""
