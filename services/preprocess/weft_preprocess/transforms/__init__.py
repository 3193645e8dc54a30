"""Backends of the preprocess service: transforms before a model."""

from collections.abc import Mapping

from weft_preprocess.transforms.features import FeaturesBackend
from weft_preprocess.transforms.image import ImageBackend
from weft_preprocess.transforms.tokenize import TokenizeBackend
from weft_serving.backends.base import Backend
from weft_serving.backends.python import PythonBackend

BACKENDS: Mapping[str, type[Backend]] = {
    "features": FeaturesBackend,
    "image": ImageBackend,
    "python": PythonBackend,
    "tokenize": TokenizeBackend,
}
