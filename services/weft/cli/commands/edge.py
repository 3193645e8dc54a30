"""``weft edge``: router and models in this one process, for small machines."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from weft.base.repository.control import add_completion_argument
from weft.base.security.arguments import add_server_arguments, given_to_server, server_fault
from weft.base.text.argument_types import add, positive
from weft.cli.arguments import ROUTER_PORT, loaded_models, model_control, port
from weft.mesh.fused import main as serve
from weft.mesh.preflight import MeshError, service_folders
from weft.mesh.service_names import GRAPHS, MODEL_SERVICES
from weft.router.arguments import GROUP, given, usage_fault
from weft.router.arguments import add_arguments as add_router_arguments
from weft.v2.client.wires import add_wire_argument
from weft.v2.server.arguments import LOG_LEVELS, add_limit_arguments, given_limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft edge``."""
    option = partial(add, parser)
    parser.description = (
        "Serve graphs and models in this process, without another one that watches it; print one line of "
        "JSON with the ports when all is ready. For small machines: pip install 'weft-mesh[onnx]' is enough."
    )
    parser.epilog = "example: weft edge --repository models --router-port 8001"
    option("--repository DIR (./model_repository)", kind=Path)
    option("--host HOST", "address to listen on", default="127.0.0.1")
    option("--router-port N", "gRPC; 0 is any free port", port, ROUTER_PORT)
    option("--metrics-port N", "default: router port + 1", port)
    add_wire_argument(parser)
    add_completion_argument(parser)
    option("--stop-with-stdin", "stop when standard input ends, so as not to outlive the parent")
    option("--grace-s S (10)", "how long stopping may take", positive)
    option("--log-level LEVEL (info)", "lowest level logged", choices=LOG_LEVELS)
    add_router_arguments(parser.add_argument_group(*GROUP))
    add_server_arguments(parser.add_argument_group("security of the ports"))
    add_limit_arguments(parser.add_argument_group("limits of connections"), has_defaults=False)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; 0 if it served until then, 1 if it could not serve, 2 for wrong usage."""
    if fault := server_fault(options) or usage_fault(options):
        return _failed(fault)
    try:
        folders = service_folders(options.repository, MODEL_SERVICES)
    except MeshError as error:
        return _failed(str(error))
    control = model_control(options)
    metrics_port = options.metrics_port
    if metrics_port is None:
        metrics_port = options.router_port + 1 if 0 < options.router_port < 65535 else 0
    services = (
        shlex.join([name, *control, f"--repository={folders[name]}"]) for name in MODEL_SERVICES if name in folders
    )
    return serve(
        [
            f"--repository={folders[GRAPHS]}",
            f"--host={options.host}",
            f"--grpc-port={options.router_port}",
            f"--metrics-port={metrics_port}",
            f"--grace-s={options.grace_s:g}",
            f"--wire={options.wire}",
            f"--log-level={options.log_level}",
            *(["--stop-with-stdin"] if options.stop_with_stdin else []),
            *(f"--in-process={service}" for service in services),
            *given(options, unless=loaded_models(options)),
            *given_to_server(options),
            *given_limits(options),
        ]
    )


def _failed(message: str) -> int:
    print(f"weft edge: {message}", file=sys.stderr)
    return 2
