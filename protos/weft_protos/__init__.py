"""Generated messages and stubs of the V2 protocol, the model configuration and the graph language."""
