"""Used by every layer: errors, tensors, signatures, text format, logs, traces, security, processes.

It imports no other layer, and neither torch nor grpcio.
"""
