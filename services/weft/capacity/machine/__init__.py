"""Profile of this machine: speed of operations and overhead of runtimes, measured once and kept in a file."""
