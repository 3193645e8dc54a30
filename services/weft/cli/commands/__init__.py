"""The commands: each module runs the one of its name."""
