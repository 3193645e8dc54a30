"""Backends of the model service; each, with onnxruntime or torch, is imported by the first model that needs it."""

from collections.abc import Mapping

from weft.serving.backends.base import Backend
from weft.serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "encoder": "weft.backends.encoder:EncoderBackend",
        "fil": "weft.backends.fil:FilBackend",
        "llm": "weft.backends.llm:LlmBackend",
        "onnxruntime": "weft.backends.onnxruntime:OnnxRuntimeBackend",
        "openai": "weft.backends.openai.backend:OpenAiBackend",
        "python": "weft.serving.backends.python:PythonBackend",
        "pytorch": "weft.backends.pytorch:PyTorchBackend",
    }
)
