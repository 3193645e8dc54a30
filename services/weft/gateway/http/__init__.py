"""The HTTP server: connections, bodies, server-sent events."""
