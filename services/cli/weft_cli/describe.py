"""What a server says about a model before it is asked anything."""

from dataclasses import replace
from typing import Any

import grpc

from weft_common.signature import TensorSpec
from weft_protos import grpc_service_pb2 as pb


async def describe(stub: Any, name: str, version: str, timeout_s: float) -> tuple[list[TensorSpec], bool]:
    """Inputs with their full shapes, and whether the model is decoupled.

    Where the server has no ``ModelConfig``, which is an extension of the protocol, no input is optional and no model
    decoupled.

    Args:
        stub: Of ``GRPCInferenceService``.
        name: Model or graph.
        version: "" is the latest.
        timeout_s: For each of two calls, in seconds.

    Raises:
        grpc.aio.AioRpcError: The server knows no such model, or cannot be reached.
    """
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), timeout=timeout_s)
    specs = [TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs]
    try:
        response = await stub.ModelConfig(pb.ModelConfigRequest(name=name, version=version), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return specs, False
        raise
    optional = {tensor.name for tensor in response.config.input if tensor.optional}
    is_decoupled = response.config.model_transaction_policy.decoupled
    return [replace(spec, is_optional=spec.name in optional) for spec in specs], is_decoupled
