"""The process of a serving service: arguments, core, server."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.base.observing.failures import Disclosure
from weft.base.repository.control import add_completion_argument, add_control_arguments, control_fault
from weft.base.security.arguments import add_channel_arguments, server_fault
from weft.base.text.argument_types import add
from weft.serving.backends.base import Backend
from weft.serving.calls import Callee
from weft.serving.config.placement import MAX_INSTANCES
from weft.serving.core import DEFAULT_MAX_INSTANCES, DEFAULT_RESPONSE_CACHE_BYTES, ServingCore
from weft.serving.lifecycle.warm_pool import WarmLimits
from weft.serving.scheduler.rate_limiter import ResourceKey, parse_limit
from weft.v2.client.wires import WireName
from weft.v2.security.channel import channel_security, read_key
from weft.v2.server import server

DEFAULT_LOAD_FILES_MIB = 1024
#: Default gRPC port of each service; metrics are on the next.
GRPC_PORTS = {"preprocess": 8011, "model": 8021, "postprocess": 8031}


def main(service: str, backends: Mapping[str, type[Backend]], argv: Sequence[str] | None = None) -> int:
    """Serve a repository until a signal; return the exit status: 0 stopped, 1 cannot listen, 2 wrong usage.

    A model that cannot be loaded does not end the process: the service is then not ready, and log and index say why.
    ``service`` is ``preprocess``, ``model`` or ``postprocess``; reading one of ``backends`` may import it.
    """
    parser = argparse.ArgumentParser(
        prog=f"weft.services.{service}", description=f"Serve the models of one repository ({service})."
    )
    add_arguments(parser)
    grpc_port = GRPC_PORTS.get(service, 0)
    server.add_arguments(parser, grpc_port=grpc_port, metrics_port=grpc_port + 1 if grpc_port else 0)
    options = parser.parse_args(argv)
    if fault := server_fault(options) or usage_fault(options):
        print(f"weft.services.{service}: error: {fault}", file=sys.stderr)  # noqa: T201  # before the log is set up
        return 2
    return server.run(
        service, lambda: make_core(options, backends, wire=options.wire), options, extend=ServingCore.extension
    )


def make_core(
    options: argparse.Namespace,
    backends: Mapping[str, type[Backend]],
    callee: Callee | None = None,
    *,
    wire: WireName | None = None,
) -> ServingCore:
    """Create the core from valid arguments, on the running event loop; ``callee`` answers without ``--router``."""
    Disclosure.is_on = Disclosure.is_on or options.dev
    limits = WarmLimits(options.warm_models, options.warm_mib << 20, options.warm_idle_s)
    return ServingCore(
        options.repository,
        backends,
        model_control=options.model_control_mode,
        load_models=options.load_model,
        repository_poll_s=options.repository_poll_secs,
        response_cache_bytes=options.response_cache_mib << 20,
        max_instances=options.max_instances,
        max_sent_bytes=options.allow_load_files << 20,
        on_demand=limits if options.load_on_demand else None,
        router=options.router,
        router_security=channel_security(options, "router-"),
        router_wire=wire,
        callee=callee,
        rate_limits=dict(options.rate_limit_resource) if options.rate_limit == "execution_count" else None,
        completes_configs=not options.disable_auto_complete_config,
        peer_security=channel_security(options, "peer-"),
        mesh_key="" if options.mesh_key_file is None else read_key(options.mesh_key_file),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for models; ``weft.v2.server.server`` adds those of the server."""
    parser.add_argument(
        "--repository", type=Path, required=True, metavar="DIR", help="folder of models: DIR/MODEL/config.pbtxt"
    )
    add_control_arguments(parser, "model")
    add_completion_argument(parser)
    parser.add_argument(
        "--router",
        default="",
        metavar="HOST:PORT",
        help="the router, which Python models call other models and graphs through; without it they call the models of "
        "this service",
    )
    add_channel_arguments(parser, "router-", "the router")
    add_channel_arguments(parser, "peer-", "other model services, for blocks of KV caches")
    parser.add_argument(
        "--mesh-key-file",
        type=Path,
        metavar="FILE",
        help="secret that all services of the mesh share, in the first line of this file: names of cached blocks of "
        "language models are made with it, so that replicas understand one another's; default: each its own",
    )
    parser.add_argument(
        "--response-cache-mib",
        type=int,
        default=DEFAULT_RESPONSE_CACHE_BYTES >> 20,
        metavar="N",
        help="answers that models with response_cache keep, all together, MiB (default %(default)s)",
    )
    parser.add_argument(
        "--max-instances",
        type=int,
        default=DEFAULT_MAX_INSTANCES,
        metavar="N",
        help="instances that a model may have whose configuration a client gives as it loads the model "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--allow-load-files",
        type=int,
        nargs="?",
        const=DEFAULT_LOAD_FILES_MIB,
        default=0,
        metavar="MIB",
        help="explicit mode: clients may send a model's files with its load, code among them; so much of all models "
        "is kept in temporary folders (default %(const)s)",
    )
    parser.add_argument(
        "--load-on-demand",
        action="store_true",
        help="load each model on its first request, which waits for it; see the --warm options",
    )
    add(parser, "--warm-models N", "on demand: models loaded at once; 0: no limit", int, 0)
    add(parser, "--warm-mib N", "on demand: size of the files of all loaded models, MiB; 0: no limit", int, 0)
    add(parser, "--warm-idle-s N", "on demand: unload a model that nobody asked for so long; 0: never", float, 0.0)
    parser.add_argument(
        "--dev",
        action="store_true",
        help="for developers: clients get the traceback of a model that fails, in the message of the error",
    )
    parser.add_argument(
        "--rate-limit",
        choices=("off", "execution_count"),
        default="off",
        help="execution_count: instances begin when they have the resources of their rate_limiter, those first that "
        "executed least (default %(default)s)",
    )
    parser.add_argument(
        "--rate-limit-resource",
        action="append",
        default=[],
        type=_limit,
        metavar="NAME:COUNT[:DEVICE]",
        help="units of a resource, on each device or on one; may be repeated; default: what the most demanding "
        "instance needs",
    )


def usage_fault(options: argparse.Namespace) -> str:
    """Return what is wrong with these arguments, "" if nothing is."""
    if not options.repository.is_dir():
        return f"--repository {options.repository}: there is no such folder"
    if fault := control_fault(options, "model"):
        return fault
    if options.rate_limit_resource and options.rate_limit == "off":
        return "--rate-limit-resource needs --rate-limit execution_count"
    if options.response_cache_mib < 1:
        return f"--response-cache-mib must be at least 1, got {options.response_cache_mib}"
    if not 1 <= options.max_instances <= MAX_INSTANCES:
        return f"--max-instances must be from 1 to {MAX_INSTANCES}, got {options.max_instances}"
    if options.allow_load_files and options.model_control_mode != "explicit":
        return "--allow-load-files needs --model-control-mode explicit"
    if options.allow_load_files < 0:
        return f"--allow-load-files must be at least 0, got {options.allow_load_files}"
    limits = (options.warm_models, options.warm_mib, options.warm_idle_s)
    if min(limits) < 0:
        return f"--warm-models, --warm-mib and --warm-idle-s must be at least 0, got {min(limits):g}"
    if any(limits) and not options.load_on_demand:
        return "--warm-models, --warm-mib and --warm-idle-s need --load-on-demand"
    return ""


def _limit(text: str) -> tuple[ResourceKey, int]:
    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
