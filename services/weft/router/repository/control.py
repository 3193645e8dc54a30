"""Loads, unloads and rollbacks that clients ask for."""

from collections.abc import Mapping

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.repository.control import ClientControl
from weft.router.repository.lifecycle import GraphLifecycle


class GraphControl:
    """Changes which graphs serve, as far as the mode of the router allows it.

    Args:
        lifecycle: Changes the graphs.
        mode: ``"none"``, ``"poll"`` or ``"explicit"``.
    """

    def __init__(self, lifecycle: GraphLifecycle, mode: str) -> None:
        self._lifecycle = lifecycle
        self._control = ClientControl(mode, "router")

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a graph; a version that does not compile does not replace one that serves.

        With the parameter ``rollback: true`` it puts back what served before the last change, also in poll mode.

        Raises:
            UnavailableError: The mode does not allow it.
            InvalidArgumentError: ``rollback`` is no bool.
            UnsupportedError: Other parameters are given.
            WeftError: As ``GraphLifecycle.load`` or ``GraphLifecycle.rollback``.
        """
        is_rollback = parameters.get("rollback", False)
        if not isinstance(is_rollback, bool):
            raise InvalidArgumentError(f"load parameter 'rollback' must be true or false, got {is_rollback!r:.80}")
        if not (is_rollback and self._control.mode == "poll"):
            self._control.check()
        if unknown := sorted(set(parameters) - {"rollback"}):
            raise UnsupportedError(
                f"load parameters {unknown} are not supported for graphs; change the file and load it again"
            )
        await self._control.finish(self._lifecycle.rollback(name) if is_rollback else self._lifecycle.load(name))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph; requests in flight finish.

        Raises:
            UnavailableError: The mode does not allow it.
            UnsupportedError: ``unload_dependents``: the models belong to other services.
            NotFoundError: No graph has that name.
        """
        self._control.check()
        if unload_dependents:
            raise UnsupportedError(
                f"unload_dependents is not supported for graphs: the models of '{name}' are unloaded at the services "
                "that serve them"
            )
        await self._control.finish(self._lifecycle.unload(name))

    async def close(self) -> None:
        """Cancel changes in progress."""
        await self._control.close()
