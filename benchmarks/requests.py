"""Requests that the benchmarks send, made with fixed seeds."""

import random
from collections.abc import Sequence

import numpy as np

from weft.base.core import InferCall
from weft.base.tensors import Array, encode
from weft.v2.protocol.encoding import serialize_call

SEED = 20
MIN_WORDS, MAX_WORDS = 5, 200

_VOCABULARY = """
the a of to in and is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its about
order parcel invoice delivery refund account password engine battery station weather garden mountain river window
paper letter number question answer morning evening summer winter market kitchen doctor teacher student music
travel ticket airport screen keyboard network server request response model graph tensor batch latency queue
"""


def texts(count: int, *, seed: int = SEED) -> list[str]:
    """Texts of ``MIN_WORDS`` to ``MAX_WORDS`` words, lengths drawn evenly."""
    draw = random.Random(seed)
    words = _VOCABULARY.split()
    return [" ".join(draw.choices(words, k=draw.randint(MIN_WORDS, MAX_WORDS))) for _ in range(count)]


def text_requests(model_name: str, input_name: str, shape: Sequence[int], count: int) -> list[bytes]:
    """Serialized requests with one text each; ``shape`` has one element."""
    return [
        serialize(model_name, {input_name: np.array([text], dtype=np.object_).reshape(shape)}) for text in texts(count)
    ]


def serialize(model_name: str, inputs: dict[str, Array]) -> bytes:
    """A serialized ``ModelInferRequest``."""
    call = InferCall(model_name, inputs={name: encode(array) for name, array in inputs.items()})
    return serialize_call(call)
