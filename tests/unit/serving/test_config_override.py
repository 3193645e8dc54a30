"""The configuration that a load gives: what protobuf's parser of JSON in C++ takes, and what nobody does."""

import pytest

from weft.base.errors import InvalidArgumentError
from weft.serving.config import parse_override
from weft_protos.model_config_pb2 import DataType, ModelConfig, ModelInput

SIZE = ModelConfig(max_batch_size=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"max_batch_size": 3}', SIZE),
        ('{"maxBatchSize": "3"}', SIZE),
        ("{'max_batch_size': 3}", SIZE),
        ("{max_batch_size: 3,}", SIZE),
        ('{"max_batch_size": 3.0, "optimization": null}', SIZE),
        ('{"max_batch_size": 5, "max_batch_size": 3}', SIZE),
        ('{"input": {"name": "A", "dims": 2}}', ModelConfig(input=[ModelInput(name="A", dims=[2])])),
        (
            '{"input": [{"name": "A", "dims": ["2"], "data_type": 11}]}',
            ModelConfig(input=[ModelInput(name="A", dims=[2], data_type=DataType.TYPE_FP32)]),
        ),
        (r"""{'name': 'a "b" \'c\' \u0041, }'}""", ModelConfig(name="a \"b\" 'c' A, }")),
        ("""{"name": "it's, }"}""", ModelConfig(name="it's, }")),
        ("{}", ModelConfig()),
    ],
)
def test_what_is_taken(text: str, expected: ModelConfig) -> None:
    """Quotes, commas, names and lists as Triton Inference Server takes them."""
    assert expected == parse_override(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "3", "null", "{", "{'a", '{"a"', "{} {}", '{"unknown": 1}', '{"max_batch_size": true}',
        '{"max_batch_size": 99999999999}', '{"input": "x"}', '{"input": [null]}', '{"parameters": [1]}',
        '{"input": {"name": "A", "unknown": 1}}', "[" * 100_000, '{"input":' * 100_000,
        '{"max_batch_size": ' + "9" * 10_000 + "}", '{"name": "\ud800"}',
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    """INVALID_ARGUMENT, whatever it is."""
    with pytest.raises(InvalidArgumentError, match="parameter 'config' is not a model configuration in JSON"):
        parse_override(text)
