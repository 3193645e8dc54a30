"""The interface of backends, helpers for writing them, and the Python backend."""
