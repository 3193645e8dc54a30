"""The preprocess service: transforms before a model."""
