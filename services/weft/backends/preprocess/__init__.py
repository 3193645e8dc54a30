"""Backends of the preprocess service: transforms before a model."""

from collections.abc import Mapping

from weft.serving.backends.base import Backend
from weft.serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "features": "weft.backends.preprocess.features:FeaturesBackend",
        "image": "weft.backends.preprocess.image:ImageBackend",
        "python": "weft.serving.backends.python:PythonBackend",
        "tokenize": "weft.backends.preprocess.tokenize:TokenizeBackend",
    }
)
