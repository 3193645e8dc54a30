"""HTTP/2 without I/O (RFC 9113): bytes in, events out, with an injected clock; server and client are roles of it."""
