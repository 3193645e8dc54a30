"""Arguments of the commands that run and watch a mesh; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.repository.control import add_completion_argument
from weft.base.security.arguments import add_channel_arguments, add_server_arguments
from weft.base.text.argument_types import not_negative, num_workers, positive
from weft.cli.arguments.shared import add_json_argument
from weft.cli.arguments.types import ROUTER_PORT, message_bytes, pair, port, replicas, service_arguments, services
from weft.mesh.service_names import MODEL_SERVICES
from weft.router.arguments import add_arguments as add_router_arguments
from weft.v2.client.wires import add_wire_argument
from weft.v2.server.limits import add_limit_arguments

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add ``weft up``, ``edge``, ``restart`` and ``top``."""
    _add_up(commands)
    _add_edge(commands)
    _add_restart(commands)
    _add_top(commands)


def _add_up(commands: "Commands") -> None:
    parser = commands.add_parser(
        "up",
        help="start the mesh on this machine",
        description="Start preprocess, model, postprocess and router as local processes; stop all of them at Ctrl-C.",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: ./model_repository"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address the router listens on; the others stay local")
    parser.add_argument("--router-port", type=port, default=ROUTER_PORT, metavar="N", help="gRPC; 0 is any free port")
    parser.add_argument(
        "--metrics-port",
        type=port,
        metavar="N",
        help="the router's metrics; default: router port + 1",
    )
    parser.add_argument(
        "--http-port",
        "--openai-port",
        type=port,
        metavar="N",
        help="serve V2 over HTTP and OpenAI's interface there; 0 is any free port (default: do not)",
    )
    parser.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="with --http-port: folder of the files and batches of OpenAI's interface (default: neither is offered)",
    )
    parser.add_argument(
        "--in-process",
        nargs="?",
        type=services,
        const=MODEL_SERVICES,
        default=(),
        metavar="NAME,NAME",
        help="run these services in the router's process, all of them if no name is given",
    )
    parser.add_argument(
        "--router-workers",
        type=num_workers,
        default=1,
        metavar="N",
        help="processes of the router, behind one port; default: 1",
    )
    parser.add_argument(
        "--replicas",
        type=replicas,
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="start so many processes of this service; may be repeated; default: one of each",
    )
    parser.add_argument(
        "--service-args",
        type=service_arguments,
        action="append",
        default=[],
        metavar="NAME='ARGUMENTS'",
        help="more arguments of this service, for example model='--load-on-demand --warm-models 2'; may be repeated",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=message_bytes,
        metavar="N",
        help="largest message that the router takes and gives, and services behind with what it adds; default: 2 GiB",
    )
    add_wire_argument(parser)
    add_completion_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON with every endpoint and pid")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
    parser.add_argument("--start-timeout-s", type=positive, default=180.0, metavar="S", help="default: 180")
    parser.add_argument(
        "--grace-s", type=positive, default=20.0, metavar="S", help="how long stopping may take; default: 20"
    )
    parser.add_argument(
        "--no-restart", action="store_true", help="a service that dies stays dead, and the others go on"
    )
    parser.add_argument(
        "--exit-on-error",
        action="store_true",
        help="end if a model or graph cannot be loaded; without it the others are served, and it is told",
    )
    parser.add_argument(
        "--hang-timeout-s",
        type=not_negative,
        default=30.0,
        metavar="S",
        help="kill and restart a service that has not answered a health check for so long; 0: never; default: 30",
    )
    add_router_arguments(
        parser.add_argument_group(
            "router",
            "poll and explicit are for models too, all of which are loaded first; the rest is for graphs alone",
        )
    )
    parser.add_argument(
        "--allow-client-shm",
        action="store_true",
        help="clients on this machine may pass tensors to the router in shared memory",
    )
    add_server_arguments(parser.add_argument_group("security of the router's ports"))
    add_limit_arguments(parser.add_argument_group("limits of connections, for every service"), has_defaults=False)


def _add_edge(commands: "Commands") -> None:
    parser = commands.add_parser(
        "edge",
        help="serve graphs and models in this one process, on a small machine",
        description="Serve graphs and models in this process, without another one that watches it; print one line of "
        "JSON with the ports when all is ready. For small machines: pip install 'weft-mesh[edge]' is enough.",
        epilog="example: weft edge --repository models --router-port 8001",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: ./model_repository"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--router-port", type=port, default=ROUTER_PORT, metavar="N", help="gRPC; 0 is any free port")
    parser.add_argument("--metrics-port", type=port, metavar="N", help="default: router port + 1")
    add_wire_argument(parser)
    add_completion_argument(parser)
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
    parser.add_argument(
        "--grace-s", type=positive, default=10.0, metavar="S", help="how long stopping may take; default: 10"
    )
    add_router_arguments(
        parser.add_argument_group(
            "router",
            "poll and explicit are for models too, all of which are loaded first; the rest is for graphs alone",
        )
    )
    add_server_arguments(parser.add_argument_group("security of the ports"))
    add_limit_arguments(parser.add_argument_group("limits of connections"), has_defaults=False)


def model_control(options: argparse.Namespace) -> list[str]:
    """Arguments of model services from those of ``weft up`` and ``edge``, for how models are loaded and completed."""
    control = {
        "poll": ["--model-control-mode=poll", f"--repository-poll-secs={options.repository_poll_secs}"],
        "explicit": ["--model-control-mode=explicit", "--load-model=*"],
    }
    completion = ["--disable-auto-complete-config"] if options.disable_auto_complete_config else []
    return [*control.get(options.model_control_mode, []), *completion]


def _add_restart(commands: "Commands") -> None:
    parser = commands.add_parser(
        "restart",
        help="replace the services of a mesh on this machine without a gap",
        description="Tell a running weft up of this user to replace every service by a new process, one after another.",
    )
    parser.add_argument(
        "--url", metavar="ADDRESS", help="whose router listens there, HOST:PORT; default: the only one that runs"
    )
    add_json_argument(parser)


def _add_top(commands: "Commands") -> None:
    parser = commands.add_parser(
        "top",
        help="show services, queues, rates and latencies as they are now",
        description="Show services, queues, rates and latencies, from the metrics of the router and of other services.",
        epilog="example: weft top --url 127.0.0.1:8002",
    )
    parser.add_argument(
        "--url",
        metavar="ADDRESS",
        help="the router's metrics, if no other service is given, and every service where a weft up of this user runs "
        f"there; default: the only weft up that runs, else 127.0.0.1:{ROUTER_PORT + 1}",
    )
    parser.add_argument(
        "--service",
        action="append",
        default=[],
        type=pair,
        metavar="NAME=ADDRESS",
        help="the metrics of a service, HOST:PORT or a URL; may be repeated",
    )
    parser.add_argument(
        "--endpoints", type=Path, metavar="FILE", help="every service of a mesh: the line that weft up --json prints"
    )
    parser.add_argument("--interval-s", type=positive, default=1.0, metavar="S", help="between frames; default: 1")
    parser.add_argument("--once", action="store_true", help="print one frame, as without a terminal")
    parser.add_argument("--json", action="store_true", help="print one frame as JSON")
    add_channel_arguments(
        parser.add_argument_group("security, of addresses that begin with https"), takes_key=False, takes_name=False
    )
