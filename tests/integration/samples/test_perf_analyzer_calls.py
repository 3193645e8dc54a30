"""The RPC sequence that perf_analyzer makes, against the router and against each service.

Order and needs as its sources have them: ModelMetadata, ModelConfig (again for each step of an ensemble), shared memory
unregister, ServerMetadata, then ModelStatistics before and after a window of ModelInfer calls.
"""

from collections.abc import Mapping

import grpc
import numpy as np
import pytest

from weft.base.processes.process import Endpoint
from weft.v2.client.channels import channel_options
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

NUM_CALLS = 20


def statistics_of(stub: GRPCInferenceServiceStub, name: str) -> dict[tuple[str, str], pb.ModelStatistics]:
    """Counters by (model, version), of one model or of all ("")."""
    response = stub.ModelStatistics(pb.ModelStatisticsRequest(name=name), timeout=20)
    return {(entry.name, entry.version): entry for entry in response.model_stats}


def profile(stub: GRPCInferenceServiceStub, model: str) -> dict[tuple[str, str], tuple[int, dict[str, int]]]:
    """What perf_analyzer reads in one window: by model version, success count and nanoseconds by part."""
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name=model), timeout=20)
    config = stub.ModelConfig(pb.ModelConfigRequest(name=model), timeout=20).config
    assert config.name == model
    is_ensemble = config.platform == "ensemble"
    for step in config.ensemble_scheduling.step:
        version = "" if step.model_version == -1 else str(step.model_version)
        assert stub.ModelConfig(pb.ModelConfigRequest(name=step.model_name, version=version), timeout=20).config.name
    stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=""), timeout=20)
    stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=""), timeout=20)
    assert "statistics" in stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=20).extensions
    scope = "" if is_ensemble else model
    before = statistics_of(stub, scope)
    request = pb.ModelInferRequest(model_name=model, id="1")
    request.parameters["triton_enable_empty_final_response"].bool_param = False
    for tensor in metadata.inputs:
        assert tensor.shape[0] == -1  # dimension 0 is the batch, because max_batch_size is above 0
        shape = [1, *(dim if dim > 0 else 4 for dim in tensor.shape[1:])]
        dtype = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[tensor.datatype]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(np.ones(shape, dtype=dtype).tobytes())
    for tensor in metadata.outputs:
        request.outputs.add(name=tensor.name)
    for _ in range(NUM_CALLS):
        response = stub.ModelInfer(request, timeout=20)
        assert len(response.raw_output_contents) == len(response.outputs) == len(metadata.outputs)
    window = {}
    for key, after in statistics_of(stub, scope).items():
        start = before[key].inference_stats
        end = after.inference_stats
        parts = {
            part: getattr(end, part).ns - getattr(start, part).ns
            for part in ("success", "queue", "compute_input", "compute_infer", "compute_output")
        }
        assert end.queue.count - start.queue.count == end.success.count - start.success.count
        window[key] = (end.success.count - start.success.count, parts)
    return window


@pytest.mark.parametrize(
    ("service", "model"),
    [
        ("router", "identity"),
        ("router", "identity3"),
        ("router", "simple"),
        ("model", "identity"),
        ("model", "minilm"),
        ("postprocess", "mean_pool"),
        ("postprocess", "triage_label"),
    ],
)
def test_the_figures_of_a_window_add_up(mesh: Mapping[str, Endpoint], service: str, model: str) -> None:
    """Every call is counted once, and queue and compute never exceed the whole, so that no overhead is negative."""
    with grpc.insecure_channel(mesh[service].grpc, options=channel_options()) as channel:
        window = profile(GRPCInferenceServiceStub(channel), model)
    count, parts = window[(model, "1")]
    assert count == NUM_CALLS
    assert parts["success"] > 0
    assert (
        parts["queue"] + parts["compute_input"] + parts["compute_infer"] + parts["compute_output"] <= parts["success"]
    )
    assert parts["compute_infer"] > 0
    if model == "identity3":
        assert window[("identity", "1")][0] == 3 * NUM_CALLS
