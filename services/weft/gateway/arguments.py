"""Command line of the gateway."""

import argparse
from pathlib import Path

from weft.base.security.arguments import add_channel_arguments, add_server_arguments, server_fault
from weft.base.text.argument_types import is_metadata_name, positive
from weft.v2.client.wires import add_wire_argument
from weft.v2.server.arguments import add_process_arguments

DEFAULT_PORT = 8000
DEFAULT_METRICS_PORT = 8003
_MAX_BODY_BYTES = 64 << 20
_MAX_JSON_BYTES = 16 << 20
_MAX_BYTES_IN_WORK = 256 << 20


def make_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(
        prog="weft.gateway", description="Serve V2 over HTTP and OpenAI's interface in front of a router."
    )
    parser.add_argument("--router", required=True, metavar="ADDRESS", help="the router, for example 127.0.0.1:8001")
    add_process_arguments(parser, metrics_port=DEFAULT_METRICS_PORT)
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of HTTP; 0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--chat-template",
        type=_template,
        action="append",
        default=[],
        metavar="MODEL=FILE",
        help="chat template of a model in place of its own; may be repeated",
    )
    parser.add_argument(
        "--timeout-s",
        type=positive,
        default=600.0,
        metavar="N",
        help="longest time for an answer, whatever a request asks for (default %(default)g)",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=_MAX_BODY_BYTES, metavar="N", help="largest body (default %(default)s)"
    )
    parser.add_argument(
        "--max-json-bytes",
        type=int,
        default=_MAX_JSON_BYTES,
        metavar="N",
        help="most JSON in a body; the rest may be binary tensors (default %(default)s)",
    )
    parser.add_argument(
        "--max-bytes-in-work",
        type=int,
        default=_MAX_BYTES_IN_WORK,
        metavar="N",
        help="bodies of all requests in work; more are refused with 429 (default %(default)s)",
    )
    parser.add_argument(
        "--forward-header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME",
        help="HTTP header that goes on to the router as metadata, for example x-client-id; may be repeated",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="with a loopback --host: a name, besides localhost, in the header 'host' of requests, as behind a proxy; "
        "* allows all; may be repeated",
    )
    parser.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="folder of OpenAI's files and batches, held by one gateway; default: neither is offered",
    )
    add_wire_argument(parser)
    add_server_arguments(parser.add_argument_group("security of its own ports"), takes_keys=False)
    called = parser.add_argument_group("security of its calls; keys are those of its clients")
    add_channel_arguments(called, "router-", "the router", takes_key=False)
    return parser


def fault_of(options: argparse.Namespace) -> str:
    """Error message for inconsistent arguments; "" if they are valid."""
    if fault := server_fault(options):
        return fault
    for name in ("max_body_bytes", "max_json_bytes", "max_bytes_in_work"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}"
    if options.max_bytes_in_work < options.max_body_bytes:
        return (
            f"--max-bytes-in-work {options.max_bytes_in_work} is less than --max-body-bytes {options.max_body_bytes}, "
            "so that no body of that size would ever be taken; raise it, or lower --max-body-bytes"
        )
    models = [model for model, _ in options.chat_template]
    if len(models) != len(set(models)):
        return f"--chat-template: each model may be given once, got {', '.join(models)}"
    return ""


def _template(text: str) -> tuple[str, Path]:
    model, separator, path = text.partition("=")
    if not (model and separator and path):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form MODEL=FILE")
    return model, Path(path)


def _header(text: str) -> str:
    name = text.lower()
    if not is_metadata_name(name):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be metadata: a name is of letters, digits, '-', '_' and '.'")
    return name
