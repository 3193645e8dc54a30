"""``weft infer``: one request, its answer on standard output; that of a decoupled model as it comes."""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import grpc

from weft_cli.answers.stream import ask_for_stream, print_stream
from weft_cli.answers.tensor import render_result
from weft_cli.answers.trace import painter, read_trace, render_trace, span_ms
from weft_cli.describe import describe
from weft_common.client.channels import MAX_TIMEOUT_S, open_channel
from weft_common.core import InferCall, InferResult, Parameters, RequestedOutput
from weft_common.errors import WeftError
from weft_common.protocol.status import from_rpc_error
from weft_common.protocol.wire import request_from_call, result_from_response
from weft_common.security.channel import channel_security
from weft_protos import grpc_service_pb2_grpc
from weft_tools.request import build_inputs, content_of, parameter_value

_TRACE_PARAMETER = "graph_trace"
_PATH_HEADER = "x-graph-path"
_INTERRUPTED = 128 + signal.SIGINT


def run(options: argparse.Namespace) -> int:
    """Print the answer and return 0, or print the error's status and message and return 1; 130 after a Ctrl-C."""
    try:
        elements = {"": [os.fsencode(text) for text in options.text]} if options.text else {}
        for name, path in options.file:
            elements.setdefault(name, []).append(path.read_bytes())
        asyncio.run(_infer(options, {name: content_of(text) for name, text in options.input}, elements))
    except OSError as error:
        print(f"weft: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    except WeftError as error:
        print(f"weft: {error.code}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # whoever reads a stream has seen enough; the request is cancelled
        return _INTERRUPTED
    return 0


async def _infer(options: argparse.Namespace, named: Mapping[str, str], elements: Mapping[str, list[bytes]]) -> None:
    name, _, version = options.model.partition("/")
    timeout_s = min(options.timeout_ms / 1000, MAX_TIMEOUT_S)
    parameters = {key: parameter_value(value) for key, value in options.param}
    if options.trace:
        parameters[_TRACE_PARAMETER] = True
    async with open_channel(options.url, security=channel_security(options)) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            specs, is_decoupled = await describe(stub, name, version, timeout_s)
            inputs = build_inputs(specs, named, elements)
            if is_decoupled:
                ask_for_stream(specs, inputs)
            outputs = tuple(RequestedOutput(output, {}) for output in options.output)
            request = request_from_call(InferCall(name, version, options.request_id, parameters, inputs, outputs))
            if is_decoupled:
                ending, duration_ms = await print_stream(stub, request, options.header, timeout_s)
                if options.trace:
                    _print_trace(ending, duration_ms)
                return
            start_ns = time.perf_counter_ns()
            call = stub.ModelInfer(request, metadata=tuple(options.header), timeout=timeout_s)
            response = await call
            duration_ms = (time.perf_counter_ns() - start_ns) / 1e6
            trailer = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        except grpc.aio.AioRpcError as error:
            if options.trace:
                _print_path(error)
            failure = from_rpc_error(error, f"'{options.url}'")
            if error.details() == "Deadline Exceeded":  # gRPC's own text: the deadline passed at this end
                text = f"'{options.url}' did not answer within {options.timeout_ms:g} ms; --timeout-ms allows longer"
                raise failure.with_message(text) from error
            raise failure from error
    _print(result_from_response(response), trailer, duration_ms, is_traced=options.trace)


def _print(result: InferResult, trailer: Mapping[str, str], duration_ms: float, *, is_traced: bool) -> None:
    print(f"{result.model_name} version {result.model_version}, {duration_ms:.1f} ms")
    print(render_result(result))
    if not is_traced:
        return
    print(f"path: {trailer.get(_PATH_HEADER, '(the answer names none)')}")
    _print_trace(result.parameters, duration_ms)


def _print_trace(parameters: Parameters, duration_ms: float) -> None:
    """What each step did, if the response's parameters say so."""
    entries = read_trace(str(parameters.get(_TRACE_PARAMETER, "")))
    if entries:
        print(render_trace(entries, painter(is_coloured=_is_coloured())))
        print(f"total: {span_ms(entries):.2f} ms in the graph, {duration_ms:.2f} ms as seen from here")


def _print_path(error: grpc.aio.AioRpcError) -> None:
    """How far the request came, where the server says so."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == _PATH_HEADER:
            print(f"path: {value}", file=sys.stderr)


def _is_coloured() -> bool:
    """Whether standard output is a terminal that shows colours, and nobody asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
