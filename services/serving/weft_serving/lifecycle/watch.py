"""Takes over models that were added, changed or removed in the repository while the service runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from weft_common.observing.logs import get_logger
from weft_serving.lifecycle.repository import Fingerprint, ModelRepository

#: Pause between two looks at a model that has changed, in seconds: one that is being copied changes meanwhile.
SETTLE_S = 0.5

_log = get_logger("weft.serving.watch")


async def _settle() -> None:
    await asyncio.sleep(SETTLE_S)


class RepositoryWatcher:
    """Compares a repository with what was taken over from it.

    Args:
        repository: Folder of models.
        load, unload: Called with the name of a model that is new or has changed, or is gone.
        settle: Waits long enough for a model that is being copied to change.
    """

    def __init__(
        self,
        repository: ModelRepository,
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        settle: Callable[[], Awaitable[None]] = _settle,
    ) -> None:
        self._repository = repository
        self._load = load
        self._unload = unload
        self._settle = settle
        self._known: dict[str, Fingerprint] = {}
        self._failure = ""

    async def start(self) -> None:
        """What is in the repository now counts as taken over. Raises OSError."""
        self._known = await asyncio.to_thread(self._repository.fingerprints)

    async def run(self, period_s: float) -> None:
        """Look every ``period_s`` seconds, for ever."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.look()
                self._failure = ""
            except OSError as error:
                if self._failure != str(error):
                    self._failure = str(error)
                    _log.error("the model repository cannot be read, what serves goes on: %s", error)
            except Exception:
                _log.exception("the model repository could not be followed")

    async def look(self) -> None:
        """Models that have changed and then stay as they are were loaded, those that are gone unloaded.

        One that still changes is left to the next look; one that cannot be loaded is tried again when it changes.

        Raises:
            OSError: The repository cannot be read.
        """
        found = await asyncio.to_thread(self._repository.fingerprints)
        changed = _changed(self._known, found)
        if not changed:
            return
        await self._settle()
        settled = await asyncio.to_thread(self._repository.fingerprints)
        names = [name for name in changed if settled.get(name) == found.get(name)]
        for name in names:
            if name in found:
                self._known[name] = found[name]
            else:
                del self._known[name]
        await asyncio.gather(*(self._load(name) if name in found else self._unload(name) for name in names))


def _changed(known: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> list[str]:
    return [name for name in dict.fromkeys([*known, *found]) if known.get(name) != found.get(name)]
