"""Child processes, restarts, and memory of service processes."""
