"""Types of tensors and of conditions, and what a condition proves."""
