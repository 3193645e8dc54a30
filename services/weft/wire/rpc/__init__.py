"""gRPC on HTTP/2 without I/O: messages, metadata, statuses, timeouts, compression."""
