"""Backends of the model service. onnxruntime and torch are imported by the first model that needs them, not here."""

from collections.abc import Mapping

from weft_model.backends.llm import LlmBackend
from weft_model.backends.onnxruntime import OnnxRuntimeBackend
from weft_model.backends.pytorch import PyTorchBackend
from weft_serving.backends.base import Backend
from weft_serving.backends.python import PythonBackend

BACKENDS: Mapping[str, type[Backend]] = {
    "llm": LlmBackend,
    "onnxruntime": OnnxRuntimeBackend,
    "python": PythonBackend,
    "pytorch": PyTorchBackend,
}
