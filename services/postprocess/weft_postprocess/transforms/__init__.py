"""Backends of the postprocess service: transforms after a model."""

from collections.abc import Mapping

from weft_serving.backends.base import Backend
from weft_serving.backends.loading import LazyBackends

BACKENDS: Mapping[str, type[Backend]] = LazyBackends(
    {
        "detokenize": "weft_postprocess.transforms.text.detokenize:DetokenizeBackend",
        "detokenize_stream": "weft_postprocess.transforms.text.detokenize_stream:DetokenizeStreamBackend",
        "distribution": "weft_postprocess.transforms.distribution:DistributionBackend",
        "interval": "weft_postprocess.transforms.interval:IntervalBackend",
        "nearest": "weft_postprocess.transforms.nearest:NearestBackend",
        "nms": "weft_postprocess.transforms.nms:NmsBackend",
        "pool": "weft_postprocess.transforms.pool:PoolBackend",
        "python": "weft_serving.backends.python:PythonBackend",
        "sigmoid": "weft_postprocess.transforms.sigmoid:SigmoidBackend",
        "softmax": "weft_postprocess.transforms.softmax:SoftmaxBackend",
    }
)
