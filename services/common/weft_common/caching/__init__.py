"""Answers that are kept, and answers that are on their way; for steps, graphs and models."""
