"""Command-line arguments of every service process, whatever it serves."""

import argparse

from weft.base.observing.watchdog import EXIT_HUNG
from weft.base.text.argument_types import not_negative


def add_process_arguments(parser: argparse.ArgumentParser, *, metrics_port: int) -> None:
    """Add where a process listens, how it stops and hands over, and how it logs.

    Args:
        parser: Of the process.
        metrics_port: Default port of the metrics.
    """
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--metrics-port", type=int, default=metrics_port, help="0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--grace-s", type=not_negative, default=10.0, help="time to finish work at a stop (default %(default)g)"
    )
    parser.add_argument(
        "--share-ports",
        action="store_true",
        help="let a process with --take-over listen on the same ports; without it a second process is refused",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="another process, with --share-ports, serves on these ports and will be told to end: listen when "
        "everything is ready, and end if it is not",
    )
    parser.add_argument(
        "--watchdog-abort-s",
        type=not_negative,
        default=0.0,
        metavar="N",
        help=f"end the process with status {EXIT_HUNG} when its event loop hangs for so long; 0: never (default 0)",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
