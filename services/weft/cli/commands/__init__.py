"""The subcommands of ``weft``, a module each."""
