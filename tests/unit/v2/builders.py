"""Messages for the scripted core."""

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from weft_protos import grpc_service_pb2 as pb


def make_request(
    model_name: str = "echo", request_id: str = "", data: bytes = b"\x01\0\0\0\x02\0\0\0", **parameters: str | int
) -> pb.ModelInferRequest:
    """A request with one raw INT32 input ``x`` of shape [1, 2]; strings and integers become parameters."""
    request = pb.ModelInferRequest(model_name=model_name, id=request_id, raw_input_contents=[data])
    request.inputs.add(name="x", datatype="INT32", shape=[1, len(data) // 4])
    for key, value in parameters.items():
        if isinstance(value, str):
            request.parameters[key].string_param = value
        else:
            request.parameters[key].int64_param = value
    return request


async def refused(call):
    """Status and text of a refusal of tritonclient's call."""
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


async def code(call):
    """How a call ended."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
