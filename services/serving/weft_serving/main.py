"""The process of a serving service: arguments, core, server."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft_common import server
from weft_serving.backends.base import Backend
from weft_serving.core import MODEL_CONTROL_MODES, ServingCore

#: Default gRPC port of each service; metrics are on the next.
GRPC_PORTS = {"preprocess": 8011, "model": 8021, "postprocess": 8031}


def main(service: str, backends: Mapping[str, type[Backend]], argv: Sequence[str] | None = None) -> int:
    """Serve a repository until told to stop; returns the exit status: 0 stopped, 1 cannot listen, 2 wrong usage.

    A model that cannot be loaded does not end the process: the service is then not ready, and log and index say why.

    Args:
        service: ``preprocess``, ``model`` or ``postprocess``.
        backends: By name; a value may be imported when it is taken.
        argv: Arguments; those of the process when None.
    """
    options = _parser(service).parse_args(argv)
    if fault := _usage_fault(options):
        print(f"weft_{service}: error: {fault}", file=sys.stderr)  # noqa: T201  # before the log is set up
        return 2

    def make_core() -> ServingCore:
        return ServingCore(
            options.repository,
            backends,
            model_control=options.model_control_mode,
            load_models=options.load_model,
        )

    return server.run(service, make_core, options)


def _parser(service: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"weft_{service}", description=f"Serve the models of one repository ({service})."
    )
    parser.add_argument(
        "--repository", type=Path, required=True, metavar="DIR", help="folder of models: DIR/MODEL/config.pbtxt"
    )
    parser.add_argument(
        "--model-control-mode",
        choices=MODEL_CONTROL_MODES,
        default="none",
        help="none: load every model, once; explicit: clients load and unload (default %(default)s)",
    )
    parser.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="explicit mode: load this model at start; may be repeated; '*' is all",
    )
    grpc_port = GRPC_PORTS.get(service, 0)
    server.add_arguments(parser, grpc_port=grpc_port, metrics_port=grpc_port + 1 if grpc_port else 0)
    return parser


def _usage_fault(options: argparse.Namespace) -> str:
    if not options.repository.is_dir():
        return f"--repository {options.repository}: there is no such folder"
    if options.load_model and options.model_control_mode != "explicit":
        return "--load-model needs --model-control-mode explicit; without it every model is loaded"
    return ""
