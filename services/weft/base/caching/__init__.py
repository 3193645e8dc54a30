"""Response caching and request coalescing, for steps, graphs and models."""
