"""What one request wants of a graph: its outputs, its route, and kept answers."""
