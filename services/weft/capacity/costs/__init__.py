"""What a model costs: bytes of its weights, and operations, bytes and memory of a batch."""
