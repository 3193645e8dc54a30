"""Calls that models make of other models."""
