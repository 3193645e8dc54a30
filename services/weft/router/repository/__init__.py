"""Graph files: found, compiled, checked against running models, swapped, rolled back."""
