"""``weft up``: the mesh on this machine, until a signal ends it."""

import argparse
import sys
from functools import partial
from pathlib import Path

from weft.base.repository.control import add_completion_argument
from weft.base.security.arguments import add_server_arguments, given_to_server, server_fault
from weft.base.text.argument_types import add, not_negative, num_workers, positive
from weft.cli.arguments import (
    ROUTER_PORT,
    loaded_models,
    message_bytes,
    model_control,
    port,
    replicas,
    service_arguments,
    services,
)
from weft.mesh.service_names import GATEWAY, MODEL_SERVICES, PAGE, ROUTER
from weft.router.arguments import GROUP, given, usage_fault
from weft.router.arguments import add_arguments as add_router_arguments
from weft.v2.client.wires import add_wire_argument
from weft.v2.server.arguments import LOG_LEVELS, add_limit_arguments, given_limits

#: What the router may add to a request before it goes on, in bytes: names of models and ids, headers, parameters.
_HOP_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft up``."""
    parser.description = (
        "Start preprocess, model, postprocess and router as local processes; stop all of them at Ctrl-C."
    )
    parser.epilog = "example: weft up --repository mine --http-port 8000 --dev"
    option = partial(add, parser.add_argument_group("what is served, and where"))
    option("--repository DIR (./model_repository)", kind=Path)
    option("--host HOST", "address the router listens on; the others stay local", default="127.0.0.1")
    option("--router-port N", "gRPC; 0 is any free port", port, ROUTER_PORT)
    option("--metrics-port N", "the router's metrics; default: router port + 1", port)
    option(
        "--http-port --openai-port N",
        "serve V2 over HTTP and OpenAI's interface there; 0 is any free port (default: do not)",
        port,
    )
    option(
        "--ui-port N",
        "serve the page that shows graphs and machines there, on this machine alone; 0 is any free port (default: do "
        "not)",
        port,
    )
    option(
        "--batch-dir DIR",
        "with --http-port: folder of the files and batches of OpenAI's interface (default: neither is offered)",
        Path,
    )
    option("--allow-client-shm", "clients on this machine may pass tensors to the router in shared memory")
    option(
        "--max-message-bytes N",
        "largest message that the router takes and gives, and services behind with what it adds; default: 2 GiB",
        message_bytes,
    )
    group = parser.add_argument_group("processes")
    option = partial(add, group)
    option(
        "--in-process NAME,NAME",
        "run these services in the router's process, all of them if no name is given",
        services,
        (),
        nargs="?",
        const=MODEL_SERVICES,
    )
    option("--router-workers N (1)", "processes of the router, behind one port", num_workers)
    option(
        "--replicas NAME=COUNT ...",
        "start so many processes of this service; may be repeated; default: one of each",
        replicas,
    )
    option(
        "--service-args NAME='ARGUMENTS' ...",
        "more arguments of this service, for example model='--load-on-demand --warm-models 2'; may be repeated",
        service_arguments,
    )
    add_wire_argument(group)
    add_completion_argument(group)
    option = partial(add, parser.add_argument_group("starting, watching, stopping"))
    option("--start-timeout-s S (180)", kind=positive)
    option(
        "--exit-on-error", "end if a model or graph cannot be loaded; without it the others are served, and it is told"
    )
    option("--no-restart", "a service that dies stays dead, and the others go on")
    option(
        "--hang-timeout-s S (30)",
        "kill and restart a service that has not answered a health check for so long; 0: never",
        not_negative,
    )
    option("--grace-s S (20)", "how long stopping may take", positive)
    option("--stop-with-stdin", "stop when standard input ends, so as not to outlive the parent")
    option = partial(add, parser.add_argument_group("what is told"))
    option("--json", "print one line of JSON with every endpoint and pid, and logs as JSON on a terminal too")
    option("--log-level LEVEL (info)", "lowest level logged, by every service", choices=LOG_LEVELS)
    option("--dev", "for developers: clients get the traceback of a model that fails, in the message of the error")
    add_router_arguments(parser.add_argument_group(*GROUP))
    add_server_arguments(parser.add_argument_group("security of the router's ports"))
    add_limit_arguments(parser.add_argument_group("limits of connections, for every service"), has_defaults=False)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; 0 if every service served until then and exited by itself, else 1.

    SIGUSR1 replaces every service by a new process, one after another, without a gap.
    """
    if fault := _port_fault(options) or server_fault(options) or usage_fault(options) or _process_fault(options):
        print(f"weft: {fault}", file=sys.stderr)
        return 2
    if options.metrics_port is None:
        options.metrics_port = options.router_port + 1 if 0 < options.router_port < 65535 else 0
    # With the mesh it takes 0.5 s, which the help and wrong usage need not.
    from weft.cli.foreground import serve  # noqa: PLC0415

    return serve(options, _router_arguments(options), _service_arguments(options))


def _port_fault(options: argparse.Namespace) -> str:
    if 0 < options.router_port == options.metrics_port:
        return f"--router-port and --metrics-port are both {options.router_port}; choose two"
    if options.batch_dir is not None and options.http_port is None:
        return "--batch-dir needs --http-port, at which its files and batches are offered"
    return ""


def _process_fault(options: argparse.Namespace) -> str:
    if options.router_workers > 1 and options.in_process:
        return (
            f"--router-workers {options.router_workers}: --in-process runs models in the router's process, which can "
            "then not be several"
        )
    if options.allow_client_shm and sys.platform != "linux":
        return "--allow-client-shm needs Linux, where shared memory has names under /dev/shm"
    for name, count in options.replicas:
        if name in options.in_process:
            return f"--replicas {name}={count}: --in-process runs '{name}' in the router; replicas are processes"
    names = [name for name, _ in options.replicas]
    return "" if len(names) == len(set(names)) else f"--replicas: each name may be given once, got {', '.join(names)}"


def _service_arguments(options: argparse.Namespace) -> dict[str, list[str]]:
    control = [*model_control(options), *(["--dev"] if options.dev else [])]
    arguments = dict.fromkeys(MODEL_SERVICES, control)
    # The router checks the keys.
    arguments[GATEWAY] = [argument for argument in given_to_server(options) if argument.startswith("--tls-")]
    limits = [*_shared_arguments(options)]
    if options.max_message_bytes is not None:
        limit_bytes = min(options.max_message_bytes + _HOP_BYTES, _MAX_MESSAGE_BYTES)
        limits.append(f"--max-message-bytes={limit_bytes}")
    for name in set(MODEL_SERVICES) - set(options.in_process):
        arguments[name] = [*arguments[name], *limits]
    arguments[PAGE] = [f"--wire={options.wire}", f"--log-level={options.log_level}"]
    arguments[GATEWAY] += arguments[PAGE]
    if options.batch_dir is not None:
        arguments[GATEWAY].append(f"--batch-dir={options.batch_dir}")
    for name, more in options.service_args:
        if name != ROUTER:
            arguments[name] = [*arguments[name], *more]
    return arguments


def _router_arguments(options: argparse.Namespace) -> list[str]:
    arguments = [*given(options, unless=loaded_models(options)), *given_to_server(options), *_shared_arguments(options)]
    if options.allow_client_shm:
        arguments.append("--allow-client-shm")
    if options.max_message_bytes is not None:
        arguments.append(f"--max-message-bytes={options.max_message_bytes}")
    if options.router_workers > 1:  # their parent kills one that hangs, within twice that time, before all would be
        arguments += [f"--workers={options.router_workers}", f"--watchdog-abort-s={options.hang_timeout_s / 3:g}"]
    return [*arguments, *(argument for name, more in options.service_args if name == ROUTER for argument in more)]


def _shared_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of every process that has a gRPC port."""
    is_strict = str(options.exit_on_error).lower()
    own = [f"--wire={options.wire}", f"--log-level={options.log_level}", f"--strict-readiness={is_strict}"]
    return [*own, *given_limits(options)]
