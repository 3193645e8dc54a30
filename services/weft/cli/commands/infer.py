"""``weft infer``: sends one request and prints the answer, that of a decoupled model response by response."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from weft.base.core import InferCall, InferResult, Parameters, RequestedOutput
from weft.base.errors import RemoteError
from weft.base.observing.console import has_colours
from weft.base.text.argument_types import add, positive
from weft.base.text.suggestion import printable
from weft.cli.answers import (
    ask_for_stream,
    painter,
    print_stream,
    read_trace,
    render_result,
    render_trace,
    result_as_json,
    span_ms,
)
from weft.cli.arguments import add_json_argument, add_request_arguments, add_router_arguments, named_file
from weft.tools.request import build_inputs, content_of, parameter_value
from weft.v2.client.answer import PATH_HEADER, TRACE_PARAMETER
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security

#: The text of gRPC itself when the deadline passes at this end.
_GRPC_LATE = "Deadline Exceeded"
_INTERRUPTED = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft infer``."""
    option = partial(add, parser)
    parser.description = "Send one request and print the answer."
    parser.epilog = """example: weft infer triage --text "The parcel never came." --trace"""
    option("model GRAPH", "graph or model; NAME/VERSION for one version")
    option("--text TEXT ...", "fills the only text input; once for each row of a batch")
    option(
        "--file [NAME=]PATH ...",
        "like --text, with the bytes of a file; NAME is the input, where there are several",
        named_file,
    )
    add_request_arguments(parser)
    add_router_arguments(parser)
    add_json_argument(parser)
    option("--timeout-ms N (30000)", "deadline", positive)
    option("--trace", "show the path taken, and when each step ran for how long")


def run(options: argparse.Namespace) -> int:
    """Print the answer and return 0; raises WeftError; 130 after a Ctrl-C."""
    try:
        elements = {"": [os.fsencode(text) for text in options.text]} if options.text else {}
        for name, path in options.file:
            elements.setdefault(name, []).append(path.read_bytes())
        asyncio.run(_infer(options, {name: content_of(text) for name, text in options.input}, elements))
    except BrokenPipeError:  # nobody reads the output, which is no file
        raise
    except OSError as error:
        print(f"weft: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # which cancels the request
        return _INTERRUPTED
    return 0


async def _infer(options: argparse.Namespace, named: Mapping[str, str], elements: Mapping[str, list[bytes]]) -> None:
    name, _, version = options.model.partition("/")
    timeout_s = min(options.timeout_ms / 1000, MAX_TIMEOUT_S)
    parameters = {key: parameter_value(value) for key, value in options.param}
    if options.trace:
        parameters[TRACE_PARAMETER] = True
    trailer: dict[str, str] = {}
    async with V2Client(options.url, security=channel_security(options)) as client:
        try:
            signature = await client.signature(name, version, timeout_s=timeout_s)
            specs = [replace(spec, dims=signature.full_shape(spec)) for spec in signature.inputs]
            inputs = build_inputs(specs, named, elements)
            if signature.is_decoupled:
                ask_for_stream(specs, inputs)
            outputs = tuple(RequestedOutput(output, {}) for output in options.output)
            request = InferCall(name, version, options.request_id, parameters, inputs, outputs)
            if signature.is_decoupled:
                results = client.stream(request, timeout_s=timeout_s, metadata=options.header)
                ending, duration_ms = await print_stream(name, results, as_json=options.json)
                if options.trace and not options.json:
                    _print_trace(ending, duration_ms)
                return
            start_ns = time.perf_counter_ns()
            result = await client.infer(request, timeout_s=timeout_s, metadata=options.header, trailer=trailer)
            duration_ms = (time.perf_counter_ns() - start_ns) / 1e6
        except RemoteError as error:
            if options.trace and error.path:
                print(printable(f"path: {error.path}"), file=sys.stderr)
            if error.message == _GRPC_LATE:
                text = f"'{options.url}' did not answer within {options.timeout_ms:g} ms; --timeout-ms allows longer"
                raise error.with_message(text) from error
            raise
    if options.json:
        print(json.dumps(result_as_json(result) | {"ms": round(duration_ms, 3)}))
        return
    _print(result, trailer, duration_ms, is_traced=options.trace)


def _print(result: InferResult, trailer: Mapping[str, str], duration_ms: float, *, is_traced: bool) -> None:
    print(printable(f"{result.model_name} version {result.model_version}, {duration_ms:.1f} ms"))
    print(render_result(result))
    if not is_traced:
        return
    print(printable(f"path: {trailer.get(PATH_HEADER, '(the answer names none)')}"))
    _print_trace(result.parameters, duration_ms)


def _print_trace(parameters: Parameters, duration_ms: float) -> None:
    """Print what each step did, if the response's parameters have it."""
    entries = read_trace(str(parameters.get(TRACE_PARAMETER, "")))
    if entries:
        print(render_trace(entries, painter(is_coloured=sys.stdout.isatty() and has_colours())))
        print(f"total: {span_ms(entries):.2f} ms in the graph, {duration_ms:.2f} ms as seen from here")
