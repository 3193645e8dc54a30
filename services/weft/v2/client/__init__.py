"""Clients of V2 servers: channels, ``V2Client``, shared memory for large tensors."""
