"""What every layer uses: errors, tensors, signatures, text format, logs, traces, security, processes.

It imports no other layer, and neither torch nor gRPC's core.
"""
