"""Devices: a table of GPUs, and a device from a user's own file."""
