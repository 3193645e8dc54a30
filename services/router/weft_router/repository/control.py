"""Load, unload and rollback as clients ask for them."""

import asyncio
from collections.abc import Coroutine, Mapping

from weft_common.core import ParameterValue
from weft_common.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from weft_router.repository.lifecycle import GraphLifecycle


class GraphControl:
    """Lets clients change what serves, as far as the mode of the router allows it.

    What was begun goes on when the client is gone, so that a graph is never left half loaded.

    Args:
        lifecycle: Changes the graphs.
        mode: ``"none"``, ``"poll"`` or ``"explicit"``.
    """

    def __init__(self, lifecycle: GraphLifecycle, mode: str) -> None:
        self._lifecycle = lifecycle
        self._mode = mode
        self._running: set[asyncio.Task[None]] = set()

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a graph; a version that does not compile does not replace one that serves.

        With the parameter ``rollback: true`` what served before the last change serves again; also in poll mode.

        Raises:
            UnavailableError: The mode does not allow it.
            InvalidArgumentError: ``rollback`` is no bool.
            UnsupportedError: Other parameters are given.
            WeftError: As ``GraphLifecycle.load`` or ``GraphLifecycle.rollback``.
        """
        is_rollback = parameters.get("rollback", False)
        if not isinstance(is_rollback, bool):
            raise InvalidArgumentError(f"load parameter 'rollback' must be true or false, got {is_rollback!r:.80}")
        if not (is_rollback and self._mode == "poll"):
            self._check_mode()
        if unknown := sorted(set(parameters) - {"rollback"}):
            raise UnsupportedError(
                f"load parameters {unknown} are not supported for graphs; change the file and load it again"
            )
        await self._to_its_end(self._lifecycle.rollback(name) if is_rollback else self._lifecycle.load(name))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph; requests in flight finish.

        Raises:
            UnavailableError: The mode does not allow it.
            UnsupportedError: ``unload_dependents``: the models belong to other services.
            NotFoundError: No graph has that name.
        """
        self._check_mode()
        if unload_dependents:
            raise UnsupportedError(
                f"unload_dependents is not supported for graphs: the models of '{name}' are unloaded at the services "
                "that serve them"
            )
        await self._to_its_end(self._lifecycle.unload(name))

    async def close(self) -> None:
        """Nothing is in work any more."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _to_its_end(self, change: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    def _check_mode(self) -> None:
        if self._mode == "poll":
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled; change the files, or start the "
                "router with --model-control-mode explicit"
            )
        if self._mode != "explicit":
            raise UnavailableError(
                "explicit model load / unload is not allowed; start the router with --model-control-mode explicit"
            )
