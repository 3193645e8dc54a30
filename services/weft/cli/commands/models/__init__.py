"""Commands that make models of models."""
