"""Takes over graph files that were added, changed or removed while the router runs."""

import asyncio
from collections.abc import Awaitable, Callable

from weft_common.observing.logs import get_logger
from weft_router.repository.files import GraphRepository, VersionFile
from weft_router.repository.lifecycle import GraphLifecycle

#: Pause between two looks at a file that has changed, in seconds: one that is still being written changes meanwhile.
SETTLE_S = 0.1

_log = get_logger("weft.router.graphs")


async def _settle() -> None:
    await asyncio.sleep(SETTLE_S)


class FileWatcher:
    """Compares a repository with what was taken over from it.

    Args:
        repository: Where the files are.
        lifecycle: Changes the graphs.
        settle: Waits long enough for a file that is being written to change.
    """

    def __init__(
        self, repository: GraphRepository, lifecycle: GraphLifecycle, settle: Callable[[], Awaitable[None]] = _settle
    ) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._settle = settle
        self._failure = ""

    async def run(self, period_s: float) -> None:
        """Look every ``period_s`` seconds, for ever."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.look()
            except Exception:
                _log.exception("the graph repository could not be followed")

    async def look(self) -> None:
        """Graphs whose files have changed, and stay as they are for a moment, were loaded; what cannot be read stays.

        A graph that still changes is left to the next look.
        """
        files = await self._scan()
        changed = {name: files.get(name, []) for name in self._changed(files)}
        if changed:
            await self._settle()
            files = await self._scan()
            settled = {
                name: given
                for name, given in changed.items()
                if files.get(name, []) == given and name not in self._repository.unreadable
            }
            if settled:
                await self._lifecycle.take_over(settled)

    async def _scan(self) -> dict[str, list[VersionFile]]:
        """The repository; as it was taken over, where it cannot be read, which is logged once."""
        try:
            files = await asyncio.to_thread(self._repository.scan)
        except OSError as error:
            if self._failure != str(error):
                self._failure = str(error)
                _log.error("the graph repository cannot be read, what serves goes on: %s", error)
            return {name: list(given) for name, given in self._lifecycle.files.items()}
        self._failure = ""
        return files

    def _changed(self, files: dict[str, list[VersionFile]]) -> list[str]:
        known = self._lifecycle.files
        names = dict.fromkeys([*known, *files])
        return [
            name
            for name in names
            if list(known.get(name, [])) != files.get(name, []) and name not in self._repository.unreadable
        ]
