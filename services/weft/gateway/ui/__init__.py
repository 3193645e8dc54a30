"""``/ui/``: a page that shows graphs, requests and machines as they are now. See ``docs/ui.md``."""
