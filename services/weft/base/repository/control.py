"""Model control: none, polling a repository, or by clients. Imports nothing heavy."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.base.text.argument_types import add

MODEL_CONTROL_MODES = ("none", "poll", "explicit")
DEFAULT_POLL_S = 15.0
_MAX_POLL_S = 86_400.0

State = TypeVar("State")

_log = get_logger("weft.repository")


def add_control_arguments(parser: argparse._ActionsContainer, what: str) -> None:
    """Add the model-control options for a service that loads graphs or models (``what``)."""
    add(
        parser,
        "--model-control-mode",
        f"none: load every {what}, once; poll: so, and take over what changes in the repository; explicit: clients "
        "load and unload (default %(default)s)",
        default="none",
        choices=MODEL_CONTROL_MODES,
    )
    text = "poll mode: seconds between two looks at the repository (default %(default)g)"
    add(parser, "--repository-poll-secs N", text, float, DEFAULT_POLL_S)
    add(parser, "--load-model NAME ...", f"explicit mode: load this {what} at start; may be repeated; '*' is all")


def add_completion_argument(parser: argparse._ActionsContainer) -> None:
    """Add the option that disables completing configurations from models' files."""
    text = "take nothing from a model's files that its config.pbtxt leaves out, and do not load a model without one"
    add(parser, "--disable-auto-complete-config", text)


def control_fault(options: argparse.Namespace, what: str) -> str:
    """Error message for invalid arguments of ``add_control_arguments``; "" if valid."""
    if options.load_model and options.model_control_mode != "explicit":
        return f"--load-model needs --model-control-mode explicit; without it every {what} is loaded"
    poll_s = options.repository_poll_secs
    if not 0 < poll_s <= _MAX_POLL_S:
        return f"--repository-poll-secs must be above 0 and at most {_MAX_POLL_S:.0f}, got {poll_s:g}"
    return ""


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
        why, cure = ("", "change the files, or ") if self.mode == "poll" else (" or models are loaded once", "")
        raise UnavailableError(
            f"explicit model load / unload is not allowed if polling is enabled{why}; {cure}start the "
            f"{self._program} with --model-control-mode explicit"
        )

    async def finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change to its end, even if its client disconnects."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the changes in progress."""
        await cancel_and_wait([*self._running])

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, even if the client has disconnected


class RepositoryWatcher(Generic[State]):
    """Compares a repository with the applied state; applies a change once it is stable between two scans.

    Args:
        what: Name of the repository, for the log, for example ``graph repository``.
        scan: Returns the state of each graph or model, by name; runs on a thread. Raises OSError.
        known: The applied states; kept up to date.
        take_over: Applies changes by name, None for removals.
        settle_s: Pause between the two scans, in seconds: a file that is being written changes in the meantime.
    """

    def __init__(
        self,
        what: str,
        scan: Callable[[], Mapping[str, State]],
        known: dict[str, State],
        take_over: Callable[[Mapping[str, State | None]], Awaitable[None]],
        settle_s: float,
    ) -> None:
        self._what = what
        self._scan = scan
        self._known = known
        self._take_over = take_over
        self._settle_s = settle_s
        self._failure = ""

    async def run(self, period_s: float) -> None:
        """Check every ``period_s`` seconds, for ever."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.look()
            except Exception:
                _log.exception("the %s could not be followed", self._what)

    async def look(self) -> None:
        """Apply stable changes; leave unstable ones to the next check.

        If the repository cannot be read, nothing changes; that is logged once.
        """
        try:
            changes = await self._settled_changes()
        except OSError as error:
            if self._failure != str(error):
                self._failure = str(error)
                _log.error("the %s cannot be read, what serves goes on: %s", self._what, error)
            return
        self._failure = ""
        for name, state in changes.items():
            if state is None:
                del self._known[name]
            else:
                self._known[name] = state
        if changes:
            await self._take_over(changes)

    async def _settled_changes(self) -> dict[str, State | None]:
        """Changes that two scans agree on. Raises OSError."""
        found = await asyncio.to_thread(self._scan)
        changed = [name for name in {**self._known, **found} if self._known.get(name) != found.get(name)]
        if not changed:
            return {}
        await self.settle()
        settled = await asyncio.to_thread(self._scan)
        return {name: found.get(name) for name in changed if settled.get(name) == found.get(name)}

    async def settle(self) -> None:
        """Wait long enough for a file that is being written to change."""
        await asyncio.sleep(self._settle_s)
