"""``python -m weft_router``: the router as a process."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from weft_common import server
from weft_router.arguments import add_arguments, usage_fault
from weft_router.core import RouterCore
from weft_router.targets.grpc_target import GrpcTarget

_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


class _Router(RouterCore):
    """A router that has its process to itself."""

    async def start(self) -> None:
        """As ``RouterCore.start``."""
        await super().start()
        gc.freeze()  # else a full collection walks every graph: 30 of 20 steps with conditions hold the loop for 0.1 s


def main(argv: Sequence[str] | None = None) -> int:
    """Serve graphs until told to stop; returns the exit status: 0 stopped, 1 cannot serve, 2 wrong usage.

    A target that does not answer, or a graph that cannot be loaded, does not end the process: the router is then not
    ready, tries again, and log and index say why.

    Args:
        argv: Arguments; those of the process when None.
    """
    options = _parser().parse_args(argv)
    if fault := _usage_fault(options):
        print(f"weft_router: error: {fault}", file=sys.stderr)  # noqa: T201  # before the log is set up
        return 2

    def make_core() -> RouterCore:
        return _Router(
            options.repository,
            [GrpcTarget(name, address) for name, address in options.target],
            model_control=options.model_control_mode,
            load_graphs=options.load_model,
            max_inflight=options.max_inflight,
            repository_poll_s=options.repository_poll_secs,
            state_dir=options.state_dir,
            allow_route_header=options.allow_route_header,
        )

    return server.run("router", make_core, options, extend=RouterCore.extension)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft_router", description="Serve graphs over model services.")
    parser.add_argument(
        "--repository", type=Path, required=True, metavar="DIR", help="folder of graphs: DIR/GRAPH/VERSION/graph.pbtxt"
    )
    parser.add_argument(
        "--target",
        type=_target,
        action="append",
        default=[],
        metavar="NAME=ADDRESS",
        help="a V2 server that answers steps, for example model=127.0.0.1:8021; may be repeated; of several where "
        "a model is ready, the first is used",
    )
    add_arguments(parser)
    server.add_arguments(parser, grpc_port=8001, metrics_port=8002)
    return parser


def _target(text: str) -> tuple[str, str]:
    name, separator, address = text.partition("=")
    if not (name and separator and address):
        raise argparse.ArgumentTypeError(f"'{text}' must be NAME=ADDRESS, for example model=127.0.0.1:8021")
    host, _, port = address.rpartition(":")
    is_host_and_port = host and port.isdecimal() and 0 < int(port) < 65536  # gRPC takes port 65537 for 1, none for 443
    if not (is_host_and_port or address.startswith(_SCHEMES)) or address.startswith(("http:", "https:")):
        raise argparse.ArgumentTypeError(
            f"address '{address}' of '{name}' must be HOST:PORT, or a name that gRPC resolves, which starts with "
            f"{', '.join(_SCHEMES)}"
        )
    return name, address


def _usage_fault(options: argparse.Namespace) -> str:
    if not options.repository.is_dir():
        return f"--repository {options.repository}: there is no such folder"
    names = [name for name, _ in options.target]
    if not names:
        return "--target is missing; give at least one, for example --target model=127.0.0.1:8021"
    if len(names) != len(set(names)):
        return f"--target: each name may be given once, got {', '.join(names)}"
    return usage_fault(options)


if __name__ == "__main__":
    sys.exit(main())
