"""What fits where, what it costs, and which settings are best."""
