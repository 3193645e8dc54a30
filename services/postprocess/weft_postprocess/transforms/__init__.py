"""Transforms after a model."""

from collections.abc import Mapping

from weft_postprocess.transforms.nearest import NearestBackend
from weft_postprocess.transforms.pool import PoolBackend
from weft_postprocess.transforms.softmax import SoftmaxBackend
from weft_serving.backends.base import Backend
from weft_serving.backends.python import PythonBackend

BACKENDS: Mapping[str, type[Backend]] = {
    "nearest": NearestBackend,
    "pool": PoolBackend,
    "python": PythonBackend,
    "softmax": SoftmaxBackend,
}
