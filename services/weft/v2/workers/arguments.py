"""Command-line arguments of a service that may have several workers."""

import argparse

from weft.base.limits import share
from weft.base.text.argument_types import num_workers
from weft.v2.workers.link import WorkerPlace


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many processes serve on the port, and what the parent tells each of them."""
    parser.add_argument(
        "--workers",
        type=num_workers,
        default=1,
        metavar="N",
        help="processes that serve on the port, each with an event loop of its own (default %(default)s)",
    )
    parser.add_argument("--worker", type=WorkerPlace.parse, help=argparse.SUPPRESS)


def settle_worker(options: argparse.Namespace) -> None:
    """Change the arguments of the whole group to those of the worker that this process is.

    Each has its part of what is limited over all connections. A Unix socket that the parent has not opened for all of
    them, as servers of grpcio cannot share one, is the first worker's; one that comes later takes nothing over.
    """
    place: WorkerPlace = options.worker
    options.max_connections = share(options.max_connections, place.num_workers)
    options.max_buffered_bytes = share(options.max_buffered_bytes, place.num_workers)
    if place.index > 1 or place.unix_descriptor is not None:
        options.unix_socket = None
    options.take_over = options.take_over and not place.listens_late
