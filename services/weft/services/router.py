"""``python -m weft.services.router``: the router as a process."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.base.processes.owned_folder import owned_folder
from weft.base.security.arguments import server_fault
from weft.base.text.argument_types import add, argument
from weft.router.admission.concurrency_limit import LOWEST_LEVEL
from weft.router.admission.controller import AdmissionSettings
from weft.router.arguments import add_arguments, usage_fault
from weft.router.core import RouterCore
from weft.router.recording import RecordingLimits
from weft.router.rollouts.place import place_of
from weft.router.targets.connect import make_target
from weft.router.targets.specification import (
    add_target_security_arguments,
    parse_target,
    policy_fault,
    target_securities,
)
from weft.router.worker import GREATEST, WorkerCore
from weft.v2.security.channel import read_key
from weft.v2.server import server
from weft.v2.server.model_metrics import ModelMetricsCollector, add_metrics_from_argument
from weft.v2.workers.group import run_group
from weft.v2.workers.link import WorkerLink, add_worker_arguments, settle_worker

CoreT = TypeVar("CoreT", bound=RouterCore)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve graphs until told to stop; returns the exit status: 0 stopped, 1 cannot serve, 2 wrong usage.

    A target that does not answer, or a graph that cannot be loaded, does not end the process: the router is then not
    ready, tries again, and log and index say why.
    """
    arguments = sys.argv[1:] if argv is None else argv
    parser = make_parser("weft.services.router", "Serve graphs over model services.")
    add_worker_arguments(parser)
    options = parser.parse_args(arguments)
    if fault := fault_of(options):
        print(f"weft.router: error: {fault}", file=sys.stderr)  # noqa: T201  # before the log is set up
        return 2
    if options.worker is not None:
        link = WorkerLink(options.worker)
        settle_worker(options)
        make = partial(WorkerCore, link)
        return server.run("router", lambda: make_core(options, make), options, extend=WorkerCore.extension, worker=link)
    if options.workers > 1:
        with contextlib.ExitStack() as stack:
            place = place_of(options.rollouts, options.repository, options.state_dir)
            place = str(stack.enter_context(owned_folder("weft-rollouts-"))) if place == "off" else place
            command = [sys.executable, "-P", "-m", "weft.services.router", *arguments, f"--rollouts={place}"]
            collectors = [ModelMetricsCollector(options.metrics_from)]
            return run_group("router", command, options, greatest=GREATEST, collectors=collectors)
    return server.run("router", lambda: make_core(options, RouterCore), options, extend=RouterCore.extension)


def make_core(options: argparse.Namespace, make: Callable[..., CoreT]) -> CoreT:
    """Create the router's core with ``make`` from arguments that ``fault_of`` accepts; needs a running event loop."""
    policies = dict(options.target_policy)
    securities = target_securities(options)
    mesh_key = "" if options.mesh_key_file is None else read_key(options.mesh_key_file)
    return make(
        options.repository,
        [
            make_target(name, address, policies.get(name), securities.get(name), wire=options.wire, mesh_key=mesh_key)
            for name, address in options.target
        ],
        model_control=options.model_control_mode,
        load_graphs=options.load_model,
        admission=AdmissionSettings(
            max_inflight=options.max_inflight,
            is_adaptive=options.adaptive_inflight,
            max_inflight_per_client=options.max_inflight_per_client,
            client_key_header=options.client_key_header,
            default_level=min(options.default_priority, LOWEST_LEVEL),
        ),
        repository_poll_s=options.repository_poll_secs,
        state_dir=options.state_dir,
        rollouts=place_of(options.rollouts, options.repository, options.state_dir),
        allow_route_header=options.allow_route_header,
        retry_budget_percent=options.retry_budget_percent,
        metrics_from=options.metrics_from,
        recording=RecordingLimits(options.record_dir, int(options.record_max_mib * (1 << 20)), options.record_max_s),
    )


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """The command-line parser of a router."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add(parser, "--repository DIR", "folder of graphs: DIR/GRAPH/VERSION/graph.pbtxt", Path, required=True)
    text = (
        "a V2 server that answers steps, for example model=127.0.0.1:8021, or several that serve the same models: "
        "model=host1:8021,host2:8021, or dns:///NAME:PORT; may be repeated; of several targets where a model is ready, "
        "the first is used"
    )
    add(parser, "--target NAME=ADDRESS ...", text, argument(parse_target))
    add_metrics_from_argument(parser)
    add_arguments(parser)
    add_target_security_arguments(parser)
    server.add_arguments(parser, grpc_port=8001, metrics_port=8002)
    return parser


def fault_of(options: argparse.Namespace, in_process: Sequence[str] = ()) -> str:
    """Return an error message for invalid arguments, else "". ``in_process`` names further targets, in this process."""
    if not options.repository.is_dir():
        return f"--repository {options.repository}: there is no such folder"
    names = [*in_process, *(name for name, _ in options.target)]
    if not names:
        return "--target is missing; give at least one, for example --target model=127.0.0.1:8021"
    if len(names) != len(set(names)):
        return f"--target: each name may be given once, got {', '.join(names)}"
    addresses = dict(options.target)
    for name, policy in options.target_policy:
        if name not in addresses:
            return f"--target-policy {name}={policy.text}: --target has no such name, it has {', '.join(addresses)}"
        if fault := policy_fault(addresses[name], policy):
            return f"--target-policy {name}={policy.text}: {fault}"
    return server_fault(options) or usage_fault(options)


if __name__ == "__main__":
    sys.exit(main())
