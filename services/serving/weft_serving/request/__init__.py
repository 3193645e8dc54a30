"""One request inside the server: what came in, what goes out, how it is split and streamed."""
