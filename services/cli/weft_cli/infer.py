"""``weft infer``: one request, its answer on standard output."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping

import grpc

from weft_cli.answer import render_result, render_trace
from weft_cli.request import build_inputs, parameter_value
from weft_common.channels import MAX_TIMEOUT_S, open_channel
from weft_common.core import InferCall, InferResult
from weft_common.errors import WeftError
from weft_common.signature import TensorSpec
from weft_common.status import from_rpc_error
from weft_common.wire import request_from_call, result_from_response
from weft_protos import grpc_service_pb2 as pb
from weft_protos import grpc_service_pb2_grpc

_TRACE_PARAMETER = "graph_trace"


def run(options: argparse.Namespace) -> int:
    """Print the answer and return 0, or print the error's status and message and return 1."""
    try:
        elements = [os.fsencode(text) for text in options.text] + [path.read_bytes() for path in options.file]
    except OSError as error:
        print(f"weft: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_infer(options, elements))
    except WeftError as error:
        print(f"weft: {error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _infer(options: argparse.Namespace, elements: list[bytes]) -> None:
    name, _, version = options.model.partition("/")
    timeout_s = min(options.timeout_ms / 1000, MAX_TIMEOUT_S)
    parameters = {key: parameter_value(value) for key, value in options.param}
    if options.trace:
        parameters[_TRACE_PARAMETER] = True
    async with open_channel(options.url) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), timeout=timeout_s)
            specs = [TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs]
            inputs = build_inputs(specs, dict(options.input), elements)
            request = request_from_call(InferCall(name, version, parameters=parameters, inputs=inputs))
            start_ns = time.perf_counter_ns()
            call = stub.ModelInfer(request, timeout=timeout_s)
            response = await call
            duration_ms = (time.perf_counter_ns() - start_ns) / 1e6
            trailer = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, f"'{options.url}'")
            if error.details() == "Deadline Exceeded":  # gRPC's own text: the deadline passed at this end
                text = f"'{options.url}' did not answer within {options.timeout_ms:g} ms; --timeout-ms allows longer"
                raise failure.with_message(text) from error
            raise failure from error
    _print(result_from_response(response), trailer, duration_ms, is_traced=options.trace)


def _print(result: InferResult, trailer: Mapping[str, str], duration_ms: float, *, is_traced: bool) -> None:
    print(f"{result.model_name} version {result.model_version}, {duration_ms:.1f} ms")
    print(render_result(result))
    if is_traced:
        print(f"path: {trailer.get('x-graph-path', '(the answer names none)')}")
        print(render_trace(json.loads(str(result.parameters.get(_TRACE_PARAMETER, "[]")))))
