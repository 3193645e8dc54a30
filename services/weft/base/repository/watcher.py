"""Applies additions, changes and removals in a repository while a service runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from weft.base.observing.logs import get_logger

State = TypeVar("State")

_log = get_logger("weft.repository")


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
        """Apply stable changes; unstable ones are left to the next check.

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
