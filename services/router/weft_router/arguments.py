"""What the router takes on its command line and ``weft up`` takes for it; imports nothing heavy."""

import argparse
from collections.abc import Iterator
from pathlib import Path

_MAX_POLL_SECS = 86_400.0


def add_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add what says how graphs are loaded and kept."""
    parser.add_argument(
        "--model-control-mode",
        choices=("none", "poll", "explicit"),
        default="none",
        help="none: load every graph, once; poll: so, and take over what changes in the repository; explicit: clients "
        "load and unload (default %(default)s)",
    )
    parser.add_argument(
        "--repository-poll-secs",
        type=float,
        default=15.0,
        metavar="N",
        help="poll mode: seconds between two looks at the repository (default %(default)g)",
    )
    parser.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="explicit mode: load this graph at start; may be repeated; '*' is all",
    )
    parser.add_argument(
        "--max-inflight",
        type=int,
        default=2048,
        metavar="N",
        help="requests in the router at once; the next is refused; 0: no limit (default %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where bandits keep what they have learned, of this router alone, made if it is not there (default: "
        "nowhere; they forget at a stop)",
    )
    parser.add_argument(
        "--allow-route-header",
        action="store_true",
        help="let clients choose the steps of splitters with the header x-graph-route",
    )


def usage_fault(options: argparse.Namespace) -> str:
    """What is wrong with these arguments; "" if nothing is."""
    if options.load_model and options.model_control_mode != "explicit":
        return "--load-model needs --model-control-mode explicit; without it every graph is loaded"
    if not 0 < options.repository_poll_secs <= _MAX_POLL_SECS:
        return (
            f"--repository-poll-secs must be above 0 and at most {_MAX_POLL_SECS:.0f}, got "
            f"{options.repository_poll_secs:g}"
        )
    if options.max_inflight < 0:
        return f"--max-inflight must be at least 0, got {options.max_inflight}"
    if options.state_dir is not None and options.state_dir.exists() and not options.state_dir.is_dir():
        return f"--state-dir {options.state_dir} is no folder"
    return ""


def given(options: argparse.Namespace) -> Iterator[str]:
    """The same arguments for the command line of another process."""
    yield f"--model-control-mode={options.model_control_mode}"
    yield f"--repository-poll-secs={options.repository_poll_secs}"
    yield from (f"--load-model={name}" for name in options.load_model)
    yield f"--max-inflight={options.max_inflight}"
    if options.state_dir is not None:
        yield f"--state-dir={options.state_dir}"
    if options.allow_route_header:
        yield "--allow-route-header"
