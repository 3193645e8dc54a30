"""Commands about capacity."""
