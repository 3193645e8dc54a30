"""Settings of a graph's models, searched on this machine against recorded or generated load."""
