"""Which device, or slice of one, holds which replica."""
