"""The ``weft`` command, a module for each subcommand. See ``docs/cli.md``."""
