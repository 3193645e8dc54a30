"""Weights in files: readers of safetensors and GGUF, and of the formats in which they are quantised."""
