"""The router: loads graphs and runs each request through their steps. See ``docs/router.md``."""
