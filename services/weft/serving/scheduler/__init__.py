"""Scheduling policy in plain Python, with the time as an argument: batchers, deadlines, rate limiter."""
