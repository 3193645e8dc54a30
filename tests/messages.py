"""Calls and results of messages of protobuf, for tests that have some."""

from weft.base.core import InferCall, InferResult
from weft.v2.protocol.codec import deserialize_request, deserialize_response
from weft.v2.protocol.encoding import serialize_call, serialize_result
from weft.v2.protocol.shared_memory import SharedMemory
from weft.v2.protocol.wire import call_of, result_of
from weft_protos import grpc_service_pb2 as pb


def call_from_request(request: pb.ModelInferRequest, memory: SharedMemory | None = None) -> InferCall:
    return call_of(deserialize_request(request.SerializeToString()), memory)


def request_from_call(call: InferCall) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(serialize_call(call))


def response_from_result(result: InferResult) -> pb.ModelInferResponse:
    return pb.ModelInferResponse.FromString(serialize_result(result))


def result_from_response(response: pb.ModelInferResponse) -> InferResult:
    return result_of(deserialize_response(response.SerializeToString()))
