"""Backends of the preprocess service: transforms before a model."""

from collections.abc import Mapping

from weft_serving.backends.base import Backend
from weft_serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "features": "weft_preprocess.transforms.features:FeaturesBackend",
        "image": "weft_preprocess.transforms.image:ImageBackend",
        "python": "weft_serving.backends.python:PythonBackend",
        "tokenize": "weft_preprocess.transforms.tokenize:TokenizeBackend",
    }
)
