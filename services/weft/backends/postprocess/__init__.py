"""Backends of the postprocess service: transforms after a model."""

from collections.abc import Mapping

from weft.serving.backends.base import Backend
from weft.serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "detokenize": "weft.backends.postprocess.detokenize:DetokenizeBackend",
        "detokenize_stream": "weft.backends.postprocess.detokenize:DetokenizeStreamBackend",
        "distribution": "weft.backends.postprocess.distribution:DistributionBackend",
        "interval": "weft.backends.postprocess.interval:IntervalBackend",
        "nearest": "weft.backends.postprocess.nearest:NearestBackend",
        "nms": "weft.backends.postprocess.nms:NmsBackend",
        "pool": "weft.backends.postprocess.pool:PoolBackend",
        "python": "weft.serving.backends.python:PythonBackend",
        "sigmoid": "weft.backends.postprocess.classifier:SigmoidBackend",
        "softmax": "weft.backends.postprocess.classifier:SoftmaxBackend",
    }
)
