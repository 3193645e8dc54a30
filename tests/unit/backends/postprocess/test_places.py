"""Faults of a configuration that only a transform can find, with the place where they were written."""

import pytest

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import InstanceContext
from weft.serving.config import define_model

CONFIG = """\
backend: "softmax"
max_batch_size: 8
input [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 5 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 5 ] } ]
parameters { key: "top_k" value { string_value: "1" } }
parameters { key: "threshold" value { string_value: "0.5" } }
"""
CASES = [
    (3, 'input [ { name: "S" data_type: TYPE_INT64 dims: [ 5 ] } ]', 9, "'S' must be FP32 or FP16 or BF16 [any], got"),
    (4, 'output [ { name: "P" data_type: TYPE_FP32 dims: [ 5 ] } ]', 10, "unknown output 'P'; use some of PROBS"),
    (
        5,
        'parameters { key: "top_k" value { string_value: "6" } }',
        49,
        "parameter 'top_k' must be a whole number from 1 to 5, got '6'",
    ),
    (
        6,
        'parameters { key: "treshold" value { string_value: "0.5" } }',
        19,
        "unknown parameter 'treshold'; did you mean 'threshold'?",
    ),
]


@pytest.mark.parametrize(("line", "replacement", "place", "message"), CASES)
def test_fault_has_its_place(tmp_path, line, replacement, place, message):
    """The error of a load begins with file, line and column and shows the line with a caret under the place."""
    folder = tmp_path / "model"
    (folder / "1").mkdir(parents=True)
    lines = CONFIG.splitlines()
    lines[line - 1] = replacement
    (folder / "config.pbtxt").write_text("\n".join(lines))
    definition = define_model(folder, [1], BACKENDS, num_gpus=0)
    backend = definition.backend(definition.contexts[1], InstanceContext("model_0_0"))
    with pytest.raises(InvalidArgumentError) as error:
        backend.load()
    first, shown, caret = error.value.message.split("\n")
    assert first.startswith(f"{folder / 'config.pbtxt'}:{line}:{place}: error: model 'model': {message}")
    assert (replacement, place - 1) == (shown, caret.index("^"))
