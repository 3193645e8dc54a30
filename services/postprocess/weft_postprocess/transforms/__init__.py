"""Backends of the postprocess service: transforms after a model."""

from collections.abc import Mapping

from weft_postprocess.transforms.distribution import DistributionBackend
from weft_postprocess.transforms.interval import IntervalBackend
from weft_postprocess.transforms.nearest import NearestBackend
from weft_postprocess.transforms.nms import NmsBackend
from weft_postprocess.transforms.pool import PoolBackend
from weft_postprocess.transforms.sigmoid import SigmoidBackend
from weft_postprocess.transforms.softmax import SoftmaxBackend
from weft_postprocess.transforms.text.detokenize import DetokenizeBackend
from weft_postprocess.transforms.text.detokenize_stream import DetokenizeStreamBackend
from weft_serving.backends.base import Backend
from weft_serving.backends.python import PythonBackend

BACKENDS: Mapping[str, type[Backend]] = {
    "detokenize": DetokenizeBackend,
    "detokenize_stream": DetokenizeStreamBackend,
    "distribution": DistributionBackend,
    "interval": IntervalBackend,
    "nearest": NearestBackend,
    "nms": NmsBackend,
    "pool": PoolBackend,
    "python": PythonBackend,
    "sigmoid": SigmoidBackend,
    "softmax": SoftmaxBackend,
}
