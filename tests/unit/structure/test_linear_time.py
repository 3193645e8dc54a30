"""Text of clients and files is read in linear time, whatever it is."""

import contextlib
import gc
import time
from collections.abc import Callable

import pytest

from weft.base.errors import WeftError
from weft.base.repository.layout import _ENSEMBLE, _MODEL
from weft.base.text.pbtxt import PbtxtError, parse
from weft.serving.config import parse_override
from weft_protos.model_config_pb2 import ModelConfig

READERS: dict[str, Callable[[str], object]] = {
    "config of a load": parse_override,
    "pbtxt": lambda text: parse(text, ModelConfig(), file="config.pbtxt"),
    "kind of a repository": lambda text: (_ENSEMBLE.search(text), _MODEL.search(text)),
}
UNITS = ("\\'", '\\"', "'", '"', "\n", " ", ",", "{", "a", "\\", "'\\", "a:", "/")


@pytest.mark.parametrize("unit", UNITS, ids=repr)
@pytest.mark.parametrize("reader", READERS)
def test_twenty_times_the_text_takes_less_than_a_hundred_times_as_long(reader: str, unit: str) -> None:
    """As linear time does and quadratic time, four hundred times, does not; an error is a right answer."""
    times = []
    gc.disable()  # of all the objects of a run of tests it takes 0.4 s
    try:
        for repetitions in (4_000, 80_000):
            start_s = time.thread_time()
            with contextlib.suppress(WeftError, PbtxtError):
                READERS[reader](unit * repetitions)
            times.append(max(time.thread_time() - start_s, 0.001))
    finally:
        gc.enable()
    assert times[1] < 100 * times[0]
