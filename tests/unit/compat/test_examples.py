"""The list of tritonclient's examples and the models that they call fit together."""

import ast

import pytest
from google.protobuf import text_format
from tests.compat.__main__ import MODELS
from tests.compat.examples import ALL, EXAMPLES, Example

from weft_protos.model_config_pb2 import ModelConfig


@pytest.mark.parametrize("name", ALL)
def test_a_model_has_a_configuration_and_a_program(name: str) -> None:
    """Of its own name."""
    config = text_format.Parse((MODELS / name / "config.pbtxt").read_text(), ModelConfig())
    assert (name, "python") == (config.name, config.backend)
    program = ast.parse((MODELS / name / "1/model.py").read_text())
    assert ["TritonPythonModel"] == [node.name for node in program.body if isinstance(node, ast.ClassDef)]


def test_every_model_is_listed() -> None:
    """And nothing else is in the folder."""
    assert sorted(ALL) == sorted(path.name for path in MODELS.iterdir() if path.name != "__pycache__")


def test_examples_count_the_models_that_they_are_given() -> None:
    """The programs that count the models of a repository want 8 over gRPC and 7 over HTTP; none is listed twice."""
    counting: dict[str, Example] = {example.name: example for example in EXAMPLES if example.is_explicit}
    assert {"simple_grpc_model_control": 8, "simple_http_model_control": 7} == {
        name: len(example.models) for name, example in counting.items()
    }
    assert len(EXAMPLES) == len({(example.name, example.arguments) for example in EXAMPLES})
