"""The network: configuration, checkpoint, weights, layers."""
