"""This machine: how fast its operations are and what its runtimes take, measured once and kept in a file."""
