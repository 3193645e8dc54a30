"""Types of tensors and conditions, and what conditions prove."""
