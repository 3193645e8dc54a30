"""Conversion between V2 messages and plain Python: codec, statuses, shared memory."""
