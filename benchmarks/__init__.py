"""Load generator and benchmarks of a whole mesh on one machine."""
