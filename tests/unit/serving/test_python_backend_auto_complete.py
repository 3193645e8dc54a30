"""``auto_complete_config`` of a ``model.py``, and the configuration in the form that models read."""

import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

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


pb_utils: Any = import_module("weft.serving.backends.python.pb_utils")  # as a model has it: with all its names


def test_types_and_numbers_are_those_of_triton():
    """Type names, numbers and numpy types convert into one another."""
    assert (np.float32, np.object_, bool) == tuple(
        map(pb_utils.triton_string_to_numpy, ("TYPE_FP32", "TYPE_STRING", "TYPE_BOOL"))
    )
    assert (1, 9, 11, 13, 13) == tuple(
        map(pb_utils.numpy_to_triton_type, (np.bool_, np.int64, np.float32, np.object_, np.bytes_))
    )
    for number in range(1, 15):
        assert number == pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number))


def test_tensor_tells_name_type_and_shape():
    """A tensor hands back its own array, and says what it is."""
    array = np.zeros((2, 3), ml_dtypes.bfloat16)
    tensor = pb_utils.Tensor("X", array)
    assert ("X", 14, [2, 3], True) == (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu())
    assert array is tensor.as_numpy()


@pytest.mark.parametrize("value", [[1.0], None, np.zeros(2, np.complex64)])
def test_tensor_needs_a_known_array(value):
    """Lists and unknown dtypes are refused with the name."""
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'X'") as error:
        pb_utils.Tensor("X", value)
    assert error.value.message() == str(error.value)


def test_tensors_share_memory_with_torch():
    """DLPack goes both ways without a copy: as an object and as a bare capsule."""
    source = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensor = pb_utils.Tensor.from_dlpack("X", source)
    source[0, 0] = 42
    assert 42 == tensor.as_numpy()[0, 0]
    torch.from_dlpack(tensor)[0, 1] = 43
    assert 43 == source[0, 1]
    capsule = pb_utils.Tensor.from_dlpack("Y", torch.utils.dlpack.to_dlpack(source))
    assert source.tolist() == capsule.as_numpy().tolist()
    assert source.tolist() == torch.from_dlpack(capsule.to_dlpack()).tolist()


def test_bfloat16_goes_both_ways():
    """DLPack carries BF16 to torch and back, as an object and as a bare capsule."""
    values = np.array([1.5, -2, 3e38], ml_dtypes.bfloat16)
    tensor = pb_utils.Tensor("X", values)
    seen = torch.from_dlpack(tensor.to_dlpack())
    assert (torch.bfloat16, values.tolist()) == (seen.dtype, seen.tolist())
    seen[0] = 4
    assert 4 == values[0]
    for back in (torch.from_dlpack(tensor), torch.utils.dlpack.to_dlpack(seen), tensor, tensor.to_dlpack()):
        again = pb_utils.Tensor.from_dlpack("Y", back)
        assert ("BF16", values.tolist()) == (again.datatype, again.as_numpy().tolist())


@pytest.mark.parametrize("given", [3, "x", None, np.zeros(1, np.complex64)])
def test_what_is_no_tensor_is_an_error(given):
    """Of DLPack's types those that the protocol lacks, and other objects, raise in the model."""
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.Tensor.from_dlpack("X", given)


def test_tensors_are_found_by_name():
    """A tensor that is not there is None."""
    response = pb_utils.InferenceResponse([pb_utils.Tensor("A", np.zeros(1)), pb_utils.Tensor("B", np.ones(1))])
    found = pb_utils.get_output_tensor_by_name(response, "B")
    assert found is response.output_tensors()[1]
    assert pb_utils.get_output_tensor_by_name(response, "C") is None


@pytest.mark.parametrize("parameters", [{"a": [1]}, {"a": None}, {"a": 2**64}, {1: "a"}])
def test_response_parameters_are_checked_where_they_are_made(parameters):
    """What the protocol cannot carry is an error of the model, not one that the client gets for a good request."""
    with pytest.raises(pb_utils.TritonModelException, match="response parameters must be bool, 64-bit int, float or"):
        pb_utils.InferenceResponse([], parameters=parameters)
    good = {"a": True, "b": 2**64 - 1, "c": 0.5, "d": "text"}
    assert good == json.loads(pb_utils.InferenceResponse([], parameters=good).parameters())  # type: ignore[arg-type]


def test_strings_are_serialised_as_on_the_wire():
    """Serialising and deserialising gives the same strings; broken bytes are an error of the model."""
    strings = np.array([b"abc", b"", "größe"], np.object_)
    data = pb_utils.serialize_byte_tensor(strings)
    assert b"\x03\x00\x00\x00abc\x00\x00\x00\x00\x07\x00\x00\x00gr\xc3\xb6\xc3\x9fe" == data
    assert [b"abc", b"", "größe".encode()] == pb_utils.deserialize_bytes_tensor(data).tolist()
    with pytest.raises(pb_utils.TritonModelException, match="incomplete string data"):
        pb_utils.deserialize_bytes_tensor(b"\x05\x00\x00\x00ab")


def test_request_that_a_model_makes_tells_what_it_was_made_of():
    """A request made to call another model has the methods of a received one; its flags can be set later."""
    made = pb_utils.InferenceRequest(
        "id", 7, [], ["Y"], "other", 2, flags=3, timeout=9, parameters={"k": 1}, priority=4
    )
    assert ("id", 7, [], ["Y"], "other", 2, 3, 9, '{"k": 1}', 4) == (
        made.request_id(), made.correlation_id(), made.inputs(), made.requested_output_names(), made.model_name(),
        made.model_version(), made.flags(), made.timeout(), made.parameters(), made.priority(),
    )  # fmt: skip
    made.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert 2 == made.flags()
    assert -1 == pb_utils.InferenceRequest(model_name="other").model_version()


def test_only_requests_of_iterative_sequences_are_scheduled_again():
    """Elsewhere the flag is an error that says what the configuration lacks; a number that is no flag is one too."""
    made = pb_utils.InferenceRequest(model_name="other")
    made.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(pb_utils.TritonModelException, match=r"iterative_sequence: true } into its config\.pbtxt"):
        made.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    with pytest.raises(pb_utils.TritonModelException, match="Unsupported flag provided: 3"):
        made.set_release_flags(3)


def test_model_folder_is_known_to_models_alone(tmp_path):
    """get_model_dir is the version folder of the model that imports the module; elsewhere it is an error."""
    assert str(tmp_path) == import_module("weft.serving.backends.python.loader").utils_of(tmp_path).get_model_dir()
    with pytest.raises(pb_utils.TritonModelException, match="no model is loaded here"):
        pb_utils.get_model_dir()


def test_missing_names_say_so():
    """What the module does not offer is named in the error."""
    with pytest.raises(
        AttributeError, match=r"triton_python_backend_utils.SharedMemory is not supported by this version"
    ):
        _ = pb_utils.SharedMemory


def test_logger_writes_to_the_log(caplog):
    """Each method of Logger writes at its own level."""
    with caplog.at_level(logging.DEBUG):
        pb_utils.Logger.log_info("a")
        pb_utils.Logger.log_warn("b")
        pb_utils.Logger.log_error("100%")
        pb_utils.Logger.log_verbose("d")
        pb_utils.Logger.log("e", pb_utils.Logger.WARNING)
        pb_utils.Logger.log("f")
    levels = [("a", "INFO"), ("b", "WARNING"), ("100%", "ERROR"), ("d", "DEBUG"), ("e", "WARNING"), ("f", "INFO")]
    assert levels == [(record.message, record.levelname) for record in caplog.records]
