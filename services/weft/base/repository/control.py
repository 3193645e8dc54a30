"""Model control modes: changes are off, follow the files, or come from clients. Imports nothing heavy."""

import argparse
import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from weft.base.errors import UnavailableError

MODEL_CONTROL_MODES = ("none", "poll", "explicit")
DEFAULT_POLL_S = 15.0
_MAX_POLL_S = 86_400.0


def add_control_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", what: str) -> None:
    """Add the options of model control.

    Args:
        parser: Parser of a service.
        what: What it loads, ``graph`` or ``model``.
    """
    parser.add_argument(
        "--model-control-mode",
        choices=MODEL_CONTROL_MODES,
        default="none",
        help=f"none: load every {what}, once; poll: so, and take over what changes in the repository; explicit: "
        "clients load and unload (default %(default)s)",
    )
    parser.add_argument(
        "--repository-poll-secs",
        type=float,
        default=DEFAULT_POLL_S,
        metavar="N",
        help="poll mode: seconds between two looks at the repository (default %(default)g)",
    )
    parser.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help=f"explicit mode: load this {what} at start; may be repeated; '*' is all",
    )


def add_completion_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that turns off what is taken from models' files."""
    parser.add_argument(
        "--disable-auto-complete-config",
        action="store_true",
        help="take nothing from a model's files that its config.pbtxt leaves out, and do not load a model without one",
    )


def control_fault(options: argparse.Namespace, what: str) -> str:
    """Error message for invalid arguments of ``add_control_arguments``; "" if valid."""
    if options.load_model and options.model_control_mode != "explicit":
        return f"--load-model needs --model-control-mode explicit; without it every {what} is loaded"
    poll_s = options.repository_poll_secs
    if not 0 < poll_s <= _MAX_POLL_S:
        return f"--repository-poll-secs must be above 0 and at most {_MAX_POLL_S:.0f}, got {poll_s:g}"
    return ""


def control_arguments(options: argparse.Namespace) -> Iterator[str]:
    """The same arguments for the command line of another process."""
    yield f"--model-control-mode={options.model_control_mode}"
    yield f"--repository-poll-secs={options.repository_poll_secs}"
    yield from (f"--load-model={name}" for name in options.load_model)


class ClientControl:
    """Load and unload requests of clients.

    A change continues when its client disconnects, so that nothing stays half loaded.

    Args:
        mode: One of ``MODEL_CONTROL_MODES``.
        program: Program to start in another mode, for messages: ``router`` or ``service``.
    """

    def __init__(self, mode: str, program: str) -> None:
        self.mode = mode
        self._program = program
        self._running: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        """Raise UnavailableError unless clients may load and unload."""
        if self.mode == "explicit":
            return
        why, cure = (" if polling is enabled", "change the files, or ") if self.mode == "poll" else ("", "")
        raise UnavailableError(
            f"explicit model load / unload is not allowed{why}; {cure}start the {self._program} with "
            "--model-control-mode explicit"
        )

    async def finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change to its end, even if its client disconnects."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the changes in progress."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, even if the client has disconnected
