"""Command line of the gateway."""

import argparse
from pathlib import Path

from weft_common.security.arguments import add_channel_arguments
from weft_common.text.argument_types import not_negative, positive

DEFAULT_PORT = 8000
DEFAULT_METRICS_PORT = 8003
_MAX_BODY_BYTES = 16 << 20


def make_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(
        prog="weft_gateway", description="Serve OpenAI's HTTP interface in front of a router."
    )
    parser.add_argument("--router", required=True, metavar="ADDRESS", help="the router, for example 127.0.0.1:8001")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of HTTP; 0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=DEFAULT_METRICS_PORT,
        help="0: chosen by the system (default %(default)s)",
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
        "--forward-header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME",
        help="HTTP header that goes on to the router as metadata, for example x-client-id; may be repeated",
    )
    parser.add_argument(
        "--grace-s", type=positive, default=10.0, help="time to finish work at a stop (default %(default)g)"
    )
    parser.add_argument(
        "--share-ports", action="store_true", help="let a process with --take-over listen on the same ports"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="listen beside another process, with --share-ports, that will end"
    )
    parser.add_argument(
        "--watchdog-abort-s",
        type=not_negative,
        default=0.0,
        metavar="N",
        help="end the process when its event loop hangs for so long; 0: never (default 0)",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
    served = parser.add_argument_group("security of its own ports")
    served.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate of this service: serve TLS only")
    served.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    served.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="clients must show a certificate that this CA issued (mTLS)"
    )
    called = parser.add_argument_group("security of its calls; keys are those of its clients")
    add_channel_arguments(called, "router-", "the router", takes_key=False)
    return parser


def fault_of(options: argparse.Namespace) -> str:
    """Error message for inconsistent arguments; "" if they are valid."""
    if (options.tls_cert is None) != (options.tls_key is None):
        return "--tls-cert and --tls-key go together"
    if options.tls_client_ca is not None and options.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    if options.max_body_bytes < 1:
        return f"--max-body-bytes must be at least 1, got {options.max_body_bytes}"
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
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or name.endswith("-bin"):
        raise argparse.ArgumentTypeError(f"'{text}' is no header that can be metadata: letters, digits, '-' and '_'")
    return name
