"""What the configuration of a language model is completed to."""

from pathlib import Path

import pytest

from weft.backends.llm.tensors import INPUTS, OUTPUTS, complete
from weft.base.errors import InvalidArgumentError

HERE = Path()


def test_an_empty_configuration_is_completed():
    """Every input, all optional, every output; decoupled, without a batch dimension."""
    completed = complete({"name": "m", "backend": "llm"}, HERE)
    assert [*INPUTS] == [tensor["name"] for tensor in completed["input"] if tensor["optional"]]
    assert [*OUTPUTS] == [tensor["name"] for tensor in completed["output"]]
    assert (0, {"decoupled": True}) == (completed["max_batch_size"], completed["model_transaction_policy"])


def test_what_is_declared_stays_in_its_place():
    """As vLLM's samples have it; it is optional all the same, because the prompt may come otherwise."""
    declared = {"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"]}
    completed = complete({"name": "m", "input": [declared]}, HERE)
    assert {**declared, "optional": True} == completed["input"][0]
    assert len(INPUTS) == len(completed["input"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_batch_size": 4}, "max_batch_size must be 0, got 4"),
        ({"sequence_batching": {}}, "sequence_batching is not possible"),
        ({"input": [{"name": "text_inptu"}]}, "has no input 'text_inptu'.*text_input"),
        ({"output": [{"name": "image"}]}, "has no output 'image'"),
        (
            {"input": [{"name": "stream", "data_type": "TYPE_STRING", "dims": ["1"]}]},
            r"input 'stream' must be TYPE_BOOL \[1\], got TYPE_STRING \[1\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    """With what was got, what is allowed and a cure."""
    with pytest.raises(InvalidArgumentError, match=message):
        complete({"name": "m", **config}, HERE)
