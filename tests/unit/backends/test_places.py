"""Faults of a configuration that only a transform can find, with the place where they were written."""

import pytest

from weft.backends import postprocess, preprocess
from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import InstanceContext
from weft.serving.config import define_model

SOFTMAX = """\
backend: "softmax"
max_batch_size: 8
input [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 5 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 5 ] } ]
parameters { key: "top_k" value { string_value: "1" } }
parameters { key: "threshold" value { string_value: "0.5" } }
"""
IMAGE = """\
backend: "image"
max_batch_size: 8
input [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
parameters { key: "width" value { string_value: "8" } }
parameters { key: "height" value { string_value: "8" } }
"""
CASES = [
    (
        SOFTMAX,
        3,
        'input [ { name: "S" data_type: TYPE_INT64 dims: [ 5 ] } ]',
        9,
        "'S' must be FP32 or FP16 or BF16 [any], got",
    ),
    (
        SOFTMAX,
        4,
        'output [ { name: "P" data_type: TYPE_FP32 dims: [ 5 ] } ]',
        10,
        "unknown output 'P'; use some of PROBS",
    ),
    (
        SOFTMAX,
        5,
        'parameters { key: "top_k" value { string_value: "6" } }',
        49,
        "parameter 'top_k' must be a whole number from 1 to 5, got '6'",
    ),
    (
        SOFTMAX,
        6,
        'parameters { key: "treshold" value { string_value: "0.5" } }',
        19,
        "unknown parameter 'treshold'; did you mean 'threshold'?",
    ),
    (
        IMAGE,
        3,
        'input [ { name: "IMAGE" data_type: TYPE_FP32 dims: [ 1 ] } ]',
        9,
        "'IMAGE' must be BYTES [1], got FP32 [1]",
    ),
    (
        IMAGE,
        4,
        'output [ { name: "P" data_type: TYPE_FP32 dims: [ 3 ] } ]',
        10,
        "'P' must be FP32 or FP16 or UINT8 [3, 8, 8]",
    ),
    (
        IMAGE,
        5,
        'parameters { key: "width" value { string_value: "0" } }',
        49,
        "parameter 'width' must be a whole number from 1 to 16384, got '0'",
    ),
    (
        IMAGE,
        5,
        'parameters { key: "width" value { string_value: "8" } } parameters { key: "fil" value { string_value: "8" } }',
        75,
        "unknown parameter 'fil'; did you mean 'fill'?",
    ),
]


@pytest.mark.parametrize(("config", "line", "replacement", "place", "message"), CASES)
def test_fault_has_its_place(tmp_path, config, line, replacement, place, message):
    """The error of a load begins with file, line and column and shows the line with a caret under the place."""
    folder = tmp_path / "model"
    (folder / "1").mkdir(parents=True)
    lines = config.splitlines()
    lines[line - 1] = replacement
    (folder / "config.pbtxt").write_text("\n".join(lines))
    definition = define_model(folder, [1], {**preprocess.BACKENDS, **postprocess.BACKENDS}, num_gpus=0)
    backend = definition.backend(definition.contexts[1], InstanceContext("model_0_0"))
    with pytest.raises(InvalidArgumentError) as error:
        backend.load()
    first, shown, caret = error.value.message.split("\n")
    assert first.startswith(f"{folder / 'config.pbtxt'}:{line}:{place}: error: model 'model': {message}")
    assert (replacement, place - 1) == (shown, caret.index("^"))
