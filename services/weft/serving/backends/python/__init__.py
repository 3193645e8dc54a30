"""The ``python`` backend: a ``model.py`` written for Triton Inference Server runs as it is."""

from weft.serving.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
