"""The postprocess service: transforms after a model."""
