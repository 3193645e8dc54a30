"""Commands that run data sets and messages through a graph."""
