"""The module ``triton_python_backend_utils``."""

import json
import logging
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

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
