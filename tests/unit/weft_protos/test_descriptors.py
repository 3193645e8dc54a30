"""The protocol files mean byte for byte what the public clients' files mean."""

import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool
from tritonclient.grpc import model_config_pb2 as client_config_pb2
from tritonclient.grpc import service_pb2 as client_service_pb2

from weft_protos import graph_pb2, grpc_service_pb2, model_config_pb2

SERVICE = "GRPCInferenceService"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(model_config_pb2, client_config_pb2), (grpc_service_pb2, client_service_pb2)],
    ids=["model_config", "grpc_service"],
)
def test_descriptor_equals_the_clients(ours, theirs):
    """Weft's descriptor and tritonclient's serialize to the same bytes under the same file name."""
    assert theirs.DESCRIPTOR.name == ours.DESCRIPTOR.name
    assert theirs.DESCRIPTOR.serialized_pb == ours.DESCRIPTOR.serialized_pb


@pytest.mark.parametrize("first", ["weft_protos.grpc_service_pb2", "tritonclient.grpc"])
def test_both_live_in_one_process_in_either_order(first):
    """Neither import order raises the TypeError of protobuf about conflicting files."""
    second = "tritonclient.grpc" if first.startswith("weft") else "weft_protos.grpc_service_pb2"
    done = subprocess.run(
        [sys.executable, "-c", f"import {first}, {second}"], check=False, capture_output=True, text=True
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_messages_are_shared_with_the_client():
    """A message of the client's class is an instance of ours, so that nothing needs to be converted."""
    request = client_service_pb2.ModelInferRequest(model_name="m")
    assert isinstance(request, grpc_service_pb2.ModelInferRequest)


def test_service_has_every_rpc_of_the_protocol():
    """The twenty RPCs that clients of Triton Inference Server may call are there, one of them streaming both ways."""
    methods = grpc_service_pb2.DESCRIPTOR.services_by_name[SERVICE].methods
    assert 20 == len(methods)
    assert ["ModelStreamInfer"] == [m.name for m in methods if m.client_streaming and m.server_streaming]


def test_graph_shares_the_field_numbers_of_model_config():
    """A field that both have carries one number and one type, so that an ensemble's config.pbtxt is a graph."""
    config = model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name
    shared = [field for field in graph_pb2.Graph.DESCRIPTOR.fields if field.number < 100]
    assert shared
    for field in shared:
        assert (config[field.name].number, config[field.name].type) == (field.number, field.type), field.name


def test_weft_fields_of_a_graph_start_at_100():
    """No field that Weft added can collide with a later field of ModelConfig."""
    config = set(model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name)
    added = [field for field in graph_pb2.Graph.DESCRIPTOR.fields if field.name not in config]
    assert added
    assert [] == [field.name for field in added if field.number < 100]


def test_files_are_registered_under_flat_names():
    """The pool knows the files by the names that tritonclient's carry, without a folder."""
    pool = descriptor_pool.Default()
    for name in ("grpc_service.proto", "model_config.proto", "graph.proto"):
        assert name == pool.FindFileByName(name).name
