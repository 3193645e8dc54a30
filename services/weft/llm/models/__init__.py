"""The transformer: configuration, checkpoint, weights, layers."""
