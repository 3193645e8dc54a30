"""The router: loads graphs and runs each request through their steps. See ``docs/router.md``."""

#: Of the calls of a target those that may be repeated, where neither the graph nor the command line says another share.
DEFAULT_RETRY_PERCENT = 20.0
