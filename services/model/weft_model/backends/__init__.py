"""Backends of the model service. Each, and onnxruntime or torch, is imported by the first model that needs it."""

from collections.abc import Mapping

from weft_serving.backends.base import Backend
from weft_serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "llm": "weft_model.backends.llm:LlmBackend",
        "onnxruntime": "weft_model.backends.onnxruntime:OnnxRuntimeBackend",
        "python": "weft_serving.backends.python:PythonBackend",
        "pytorch": "weft_model.backends.pytorch:PyTorchBackend",
    }
)
