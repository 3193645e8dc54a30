"""Tasks that start and end together."""
