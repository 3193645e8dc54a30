"""One request inside the server: its data, its parts, its stream of responses."""
