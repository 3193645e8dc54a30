"""Weights in files: readers of safetensors and GGUF, and of quantised formats."""
