"""V2 over HTTP: the Open Inference Protocol, with Triton Inference Server's extensions."""
