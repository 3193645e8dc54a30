"""Decode steps as CUDA graphs: which are captured, capture and replay, and room for them beside the KV cache."""
