"""Tensors in the memory of a GPU, between tritonclient and a model service in a process of its own."""

import uuid

import numpy as np
import pytest
from tests.integration.batching import running_service
from tritonclient import grpc as triton

from weft.serving.config.placement import count_gpus

X = np.arange(16, dtype=np.float32).reshape(1, 16)


@pytest.fixture
def address(repository):
    """``host:port`` of a model service that allows shared memory; it serves ``identity``."""
    with running_service(repository / "model", "--allow-client-shm", "--load-model", "identity") as service:
        yield service.grpc


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
def test_a_request_and_its_answer_in_the_memory_of_a_gpu(address):
    """What the client wrote there is answered there, and the region is no longer known when it is unregistered."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-python, which tritonclient uses")
    from tritonclient.utils import cuda_shared_memory as shm

    name = f"weft-{uuid.uuid4().hex}"
    regions = [shm.create_shared_memory_region(f"{name}-{way}", X.nbytes, 0) for way in ("in", "out")]
    try:
        shm.set_shared_memory_region(regions[0], [X])
        with triton.InferenceServerClient(address) as client:
            for way, region in zip(("in", "out"), regions, strict=True):
                client.register_cuda_shared_memory(f"{name}-{way}", shm.get_raw_handle(region), 0, X.nbytes)
            metadata = client.get_model_metadata("identity")
            tensor = triton.InferInput(metadata.inputs[0].name, list(X.shape), "FP32")
            tensor.set_shared_memory(f"{name}-in", X.nbytes)
            output = triton.InferRequestedOutput(metadata.outputs[0].name)
            output.set_shared_memory(f"{name}-out", X.nbytes)
            client.infer("identity", [tensor], outputs=[output])
            assert X.tolist() == shm.get_contents_as_numpy(regions[1], np.float32, [1, 16]).tolist()
            client.unregister_cuda_shared_memory()
            assert {} == client.get_cuda_shared_memory_status(as_json=True)
    finally:
        for region in regions:
            shm.destroy_shared_memory_region(region)


@pytest.mark.skipif(count_gpus() > 0, reason="needs a machine without a GPU")
def test_without_a_gpu_the_refusal_says_what_is_missing(address):
    """Register is UNIMPLEMENTED with the library that is not there; status and unregister succeed."""
    with triton.InferenceServerClient(address) as client:
        with pytest.raises(triton.InferenceServerException, match=r"region: 'r', GPUs not supported: .*lib") as caught:
            client.register_cuda_shared_memory("r", b"", 0, 64)
        assert "StatusCode.UNIMPLEMENTED" == caught.value.status()
        client.unregister_cuda_shared_memory()
        assert {} == client.get_cuda_shared_memory_status(as_json=True)
        assert "cuda_shared_memory" not in client.get_server_metadata().extensions
