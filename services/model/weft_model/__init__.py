"""The model service: batched execution on CPU and GPU."""
