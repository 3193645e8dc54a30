"""Commands that work on files, without a server."""
