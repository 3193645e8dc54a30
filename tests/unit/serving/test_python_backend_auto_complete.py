"""``auto_complete_config`` of a ``model.py``, and the configuration in the form that models read."""

import json
from pathlib import Path

import pytest

from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError
from weft.serving.backends.python import PythonBackend
from weft.serving.backends.python.pb_utils import INTEGER_FIELDS, ModelConfig
from weft.serving.config import define_model
from weft_protos import model_config_pb2

SOURCE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        inputs = [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}]
        outputs = [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
        config = auto_complete_model_config.as_dict()
        names = [tensor["name"] for tensor in config["input"] + config["output"]]
        for tensor in inputs:
            if tensor["name"] not in names:
                auto_complete_model_config.add_input(tensor)
        for tensor in outputs:
            auto_complete_model_config.add_output(tensor)
        auto_complete_model_config.set_max_batch_size(16)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        pass
"""


def _auto_complete(config, folder: Path):
    complete = PythonBackend.auto_complete
    assert complete is not None
    return complete(config, folder)


def test_model_completes_its_configuration(version_folder):
    """Inputs, outputs, batch size and batching of an empty configuration come from the model."""
    (version_folder / "model.py").write_text(SOURCE)
    assert {
        "name": "m",
        "max_batch_size": 16,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "parameters": {},
        "dynamic_batching": {},
    } == _auto_complete({"name": "m"}, version_folder)


def test_model_without_the_function_changes_nothing(version_folder):
    """A model that does not complete anything leaves the configuration as it is."""
    (version_folder / "model.py").write_text("class TritonPythonModel:\n    pass\n")
    assert {"name": "m"} == _auto_complete({"name": "m"}, version_folder)


def test_contradiction_is_an_error_with_its_line(version_folder):
    """A configuration that says otherwise than the model is refused, with the line of the model and both values."""
    (version_folder / "model.py").write_text(SOURCE)
    config = {"name": "m", "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT64", "dims": ["-1"]}]}
    with pytest.raises(InvalidArgumentError) as error:
        _auto_complete(config, version_folder)
    assert "model.py:16: ValueError: model 'm': output 'OUTPUT0' has data_type TYPE_INT64" in error.value.message
    assert "but the model says TYPE_FP32" in error.value.message


def test_wrong_result_is_an_error(version_folder):
    """A function that forgets to return the configuration is refused."""
    (version_folder / "model.py").write_text(SOURCE.replace("return auto_complete_model_config", "pass"))
    with pytest.raises(InvalidArgumentError, match=r"must return the pb_utils.ModelConfig, got NoneType"):
        _auto_complete({"name": "m"}, version_folder)


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("set_max_batch_size", 2, "max_batch_size is 4 in the configuration, but the model allows 2"),
        ("add_input", {"name": "x", "dims": [1]}, "lacks ['data_type']"),
        ("add_output", {"name": "x", "data_type": "TYPE_FP32", "dims": [1], "optional": True}, "['optional']"),
        ("set_model_transaction_policy", {"streams": True}, "has no property ['streams']"),
        ("set_model_transaction_policy", {"decoupled": True}, "decoupled is False in the configuration"),
    ],
)
def test_wrong_use_is_a_value_error(method, argument, message):
    """Each method of ModelConfig refuses what contradicts the file or has unknown properties."""
    config = ModelConfig(
        json.dumps({"name": "m", "max_batch_size": 4, "model_transaction_policy": {"decoupled": False}})
    )
    with pytest.raises(ValueError, match="model 'm'") as error:
        getattr(config, method)(argument)
    assert message in str(error.value)


def test_integer_fields_are_those_of_the_protocol():
    """The table of 64-bit fields holds every such field that ModelConfig can reach as a value, and no other name."""
    expected, texts = set(), set()
    pending, seen = [model_config_pb2.ModelConfig.DESCRIPTOR], set()
    while pending:
        message = pending.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            if field.message_type is not None:
                pending.append(field.message_type)
            elif field.type in (field.TYPE_INT64, field.TYPE_UINT64) and not message.GetOptions().map_entry:
                expected.add(field.name)
            elif field.type == field.TYPE_STRING:
                texts.add(field.name)
    assert expected == INTEGER_FIELDS
    assert not texts & INTEGER_FIELDS


def _model(folder: Path, body: str) -> None:
    """Writes a model whose ``auto_complete_config(config)`` is ``body``."""
    source = "import sys\n\n\nclass TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
    (folder / "model.py").write_text(f"{source}        {body}\n        return config\n")


def _define(folder: Path, config: str):
    (folder.parent / "config.pbtxt").write_text(config)
    return define_model(folder.parent, [1], {"python": PythonBackend}, num_gpus=0)


COMPLETE = """
backend: "python"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def test_complete_configuration_is_completed_further(version_folder):
    """A model with every tensor declared may still turn on batching, a larger batch and decoupled responses."""
    policy = "config.set_model_transaction_policy(dict(decoupled=True))"
    _model(version_folder, f"config.set_dynamic_batching(); config.set_max_batch_size(8); {policy}")
    definition = _define(version_folder, COMPLETE)
    assert (8, True, True) == (
        definition.config.max_batch_size,
        definition.config.HasField("dynamic_batching"),
        definition.contexts[1].signature.is_decoupled,
    )


def test_complete_configuration_does_not_import_a_model_without_the_function(version_folder):
    """A model that completes nothing is not run before it is loaded."""
    (version_folder / "model.py").write_text("raise ValueError('imported')\n")
    assert 4 == _define(version_folder, COMPLETE).config.max_batch_size


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "raise ValueError('here')",
            InvalidArgumentError,
            "auto_complete_config failed: .*model.py:7: ValueError: here",
        ),
        ("sys.exit(3)", InternalError, "auto_complete_config failed: .*model.py:7: SystemExit: 3"),
        (
            "__import__('os')._exit(3)",
            UnavailableError,
            "auto_complete_config of model 'model' ended with exit status 3",
        ),
        ("return 1", InvalidArgumentError, "must return the pb_utils.ModelConfig, got int"),
        ("config.as_dict()['nonsense'] = 1", InvalidArgumentError, "gave no valid configuration: .*nonsense"),
        ("config.add_output({'name': 'A'})", InvalidArgumentError, "lacks .*'data_type', 'dims'"),
        ("config.set_max_batch_size(2)", InvalidArgumentError, "max_batch_size is 4 in the configuration, but"),
        (
            "config.add_input({'name': 'INPUT0', 'data_type': 'TYPE_INT8', 'dims': [4]})",
            InvalidArgumentError,
            "input 'INPUT0' has data_type TYPE_FP32 in the configuration, but the model says TYPE_INT8",
        ),
        ("config.set_model_transaction_policy(dict(other=1))", InvalidArgumentError, "no property .*'other'"),
    ],
)
def test_bad_auto_complete_is_a_load_error(version_folder, body, error, message):
    """Whatever the function does wrong is the reason why the model does not load."""
    _model(version_folder, body)
    with pytest.raises(error, match=message):
        _define(version_folder, COMPLETE)
