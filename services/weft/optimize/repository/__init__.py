"""A model in its repository: found, staged for a trial, and given a new version."""
