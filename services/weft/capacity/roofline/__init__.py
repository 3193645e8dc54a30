"""Time and memory of a batch on a device."""
