"""One request of a graph: what it asks for, and what surrounds its run."""
