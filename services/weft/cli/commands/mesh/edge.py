"""``weft edge``: router and models in this one process, for small machines."""

import argparse
import shlex
import sys

from weft.base.security.arguments import given_to_server, server_fault
from weft.cli.arguments.mesh import model_control
from weft.mesh.fused.__main__ import main as serve
from weft.mesh.preflight import MeshError, service_folders
from weft.mesh.service_names import GRAPHS, MODEL_SERVICES
from weft.router.arguments import given, usage_fault
from weft.v2.server.limits import given_limits


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; 0 if it served until then, 1 if it could not serve, 2 for wrong usage."""
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
            *(["--stop-with-stdin"] if options.stop_with_stdin else []),
            *(f"--in-process={service}" for service in services),
            *given(options),
            *given_to_server(options),
            *given_limits(options),
        ]
    )


def _failed(message: str) -> int:
    print(f"weft edge: {message}", file=sys.stderr)
    return 2
