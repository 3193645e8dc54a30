"""A gRPC server process: ports, servicers, health, metrics page, shutdown."""
