"""Commands that run a mesh on this machine, or watch it."""
