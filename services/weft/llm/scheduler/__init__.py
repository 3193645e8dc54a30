"""Scheduling policy: which sequence computes which tokens in the next step. Plain Python without a tensor library."""
