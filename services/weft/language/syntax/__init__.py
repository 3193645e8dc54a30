"""A graph file as it was read: source, parsed fields, diagnostics."""
