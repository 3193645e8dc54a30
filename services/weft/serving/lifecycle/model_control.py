"""Loads and unloads that models request through ``pb_utils``."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.serving.lifecycle.background import on_loop


class Loader(Protocol):
    """Loads and unloads models: the core of this process."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether the version ("" = any) serves. Raises NotFoundError."""

    async def load_nested(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a model without waiting for other loads. Raises WeftError."""

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model. Raises WeftError."""


class ModelControl:
    """The ``RepositoryControl`` of a service; may be used from any thread.

    Args:
        loader: Used on the event loop alone.
        loop: The event loop of the loader.
    """

    def __init__(self, loader: Loader, loop: asyncio.AbstractEventLoop) -> None:
        self._loader = loader
        self._loop = loop
        #: Models that each model loads or unloads now.
        self._waits_for: dict[str, list[str]] = {}
        self._unloads: set[asyncio.Task[None]] = set()

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Load a model; the future fails with a WeftError.

        Args:
            asker: The model that requests it, and waits meanwhile.
            name: The model to load.
            parameters: As of ``RepositoryModelLoad``.
        """
        return self._submit(self._load(asker, name, parameters))

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Unload a model; a model that unloads itself is not awaited."""
        return self._submit(self._unload(asker, name, unload_dependents))

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Whether the version ("" = any) serves; False for an unknown one."""
        return self._submit(self._is_ready(name, version))

    async def _load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        with self._waiting("load", asker, name):
            await self._loader.load_nested(name, parameters)

    async def _unload(self, asker: str, name: str, unload_dependents: bool) -> None:
        if asker != name:
            with self._waiting("unload", asker, name):
                await self._loader.unload(name, unload_dependents=unload_dependents)
            return
        task = asyncio.create_task(self._loader.unload(name, unload_dependents=unload_dependents))
        await asyncio.wait([task], timeout=0)  # it ends after this request is answered; faults are known at once
        if task.done():
            await task
        else:
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _is_ready(self, name: str, version: str) -> bool:
        try:
            return self._loader.is_model_ready(name, version)
        except NotFoundError:
            return False

    @contextmanager
    def _waiting(self, action: str, asker: str, name: str) -> Iterator[None]:
        """Record that ``asker`` waits for ``name``. Raises InvalidArgumentError if that waits for ``asker``."""
        awaited = {name}
        while more := {after for model in awaited for after in self._waits_for.get(model, ())} - awaited:
            awaited |= more
        if asker in awaited:
            raise InvalidArgumentError(
                f"failed to {action} '{name}': model '{asker}', which asks for it, would wait for itself; a model can "
                "load neither itself nor one that loads it, nor unload that"
            )
        self._waits_for.setdefault(asker, []).append(name)
        try:
            yield
        finally:
            self._waits_for[asker].remove(name)
            if not self._waits_for[asker]:
                del self._waits_for[asker]

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return on_loop(coroutine, self._loop, "the service is stopping; it loads and unloads no models")
