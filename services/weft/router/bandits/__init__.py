"""Splitters that learn from feedback: choices, pending rewards, persistence."""
