"""Rollouts: counts of candidate and baseline, sequential tests, and the decisions that follow from them."""
