"""Takes over what is added, changed or removed in a repository while a service runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from weft_common.observing.logs import get_logger

State = TypeVar("State")

_log = get_logger("weft.repository")


class RepositoryWatcher(Generic[State]):
    """Compares a repository with what was taken over from it: what changed and then stays as it is, is taken over.

    Args:
        what: The repository, for the log, for example ``graph repository``.
        scan: The state of each graph or model, by name; runs on a thread. Raises OSError.
        known: The states that were taken over; kept up to date.
        take_over: Receives the changes by name, None for what is gone.
        settle_s: Pause between two scans when something has changed: a file that is being written changes meanwhile.
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
        """Look every ``period_s`` seconds, for ever."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.look()
            except Exception:
                _log.exception("the %s could not be followed", self._what)

    async def look(self) -> None:
        """Take over what has changed; what still changes is left to the next look.

        A repository that cannot be read is as it was; that is logged once.
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
        """Raises OSError."""
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
