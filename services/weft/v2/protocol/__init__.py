"""Conversion between the V2 protocol and plain Python: tensors, statuses, shared memory."""
