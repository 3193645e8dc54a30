"""Splitters that learn: what they choose, what they remember, and where they keep it."""
