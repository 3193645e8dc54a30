"""Programs of others that run as they are."""
