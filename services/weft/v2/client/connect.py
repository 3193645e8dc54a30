"""``connect`` and ``connect_async``; ``Client``, which runs an ``AsyncClient`` for any number of threads."""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, Unpack

from typing_extensions import TypeVar

from weft.base.errors import WeftError
from weft.v2.client.aio import AsyncClient, ConnectOptions, ModelTable, closed, public

_STOP_TIMEOUT_S = 5.0
#: Held while a client starts or a call begins; reentrant, since a stream may be collected as garbage meanwhile.
_STARTING = threading.RLock()


class Model:
    """One graph or model of a ``Client``; calls block. Inputs, options and errors are those of ``AsyncModel``."""

    def __init__(self, client: "Client", name: str, version: str = "") -> None:
        self._client = client
        self.name = name
        self.version = version

    def __call__(self, /, **values: Any) -> Any:
        """The ``Answer``. KeyboardInterrupt cancels the request."""
        return self._client._run(lambda client: client.models[self.name, self.version](**values))

    def stream(self, /, **values: Any) -> Generator[Any, None, None]:
        """Yield each response as an ``Answer``, when it arrives; closing the generator cancels the request."""
        answers: AsyncGenerator[Any, None] | None = None

        async def following(client: AsyncClient) -> Any:
            nonlocal answers
            answers = answers or client.models[self.name, self.version].stream(**values)
            return await anext(answers, None)

        try:
            while (answer := self._client._run(following)) is not None:
                yield answer
        finally:
            if answers is not None:
                self._client._post(answers.aclose())


class Client:
    """A client that blocks, for any number of threads: ``client.NAME(INPUT=value)``.

    Arguments are those of ``AsyncClient``, calls those of ``Model``. It works on a thread of its own, which starts at
    the first call, after a fork anew, and ends with ``close``, the ``with`` block or the client.
    """

    def __init__(self, address: str, **options: Unpack[ConnectOptions]) -> None:
        self._make = partial(AsyncClient, address, **options)
        self._make()  # raises what is wrong
        self._address = address
        self._is_closed = False
        self._thread: _LoopThread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Model:
        return self.models[public(name)]

    def __dir__(self) -> list[str]:
        with suppress(WeftError):
            return [*super().__dir__(), *self.models.names()]
        return [*super().__dir__()]

    @property
    def models(self) -> ModelTable[Model]:
        """Models by name, or name and version."""
        return ModelTable(partial(Model, self), lambda: self._run(lambda client: client.models.names()))

    def close(self) -> None:
        """Cancel calls in flight and close the connection; further calls raise UnavailableError."""
        with _STARTING:
            self._is_closed = True
        if self._thread is not None:
            self._thread.stop()

    def _run(self, begin: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        with _STARTING:
            if self._is_closed:
                raise closed(self._address)
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _LoopThread(self._make())
                weakref.finalize(self, self._thread.stop)
            future = self._thread.begin(begin)
        try:
            return future.result()
        except futures.CancelledError:
            raise closed(self._address) from None
        except BaseException:
            future.cancel()
            raise

    def _post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        with _STARTING:
            if self._thread is not None and not self._is_closed:
                self._thread.begin(lambda _: coroutine)
            else:
                coroutine.close()


@dataclass(eq=False)
class _LoopThread:
    """An event loop on a thread, and the client that it runs."""

    client: AsyncClient

    def __post_init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="weft-client", daemon=True)
        self._thread.start()

    def begin(self, begin: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> "futures.Future[Any]":
        async def work() -> Any:
            return await begin(self.client)

        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def stop(self) -> None:
        if self.pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(_STOP_TIMEOUT_S)

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self.client.close()


ClientType = TypeVar("ClientType", default=Client)
AsyncClientType = TypeVar("AsyncClientType", default=AsyncClient)


def connect(address: str, types: type[ClientType] | None = None, **options: Unpack[ConnectOptions]) -> ClientType:
    """Make a client of a router, or any server of the V2 protocol; it connects at the first call.

    >>> with weft.connect(address) as client:
    ...     client.double(X=[1.5, 2]).Y.tolist()
    [[3.0], [4.0]]

    Args:
        address: ``host:port`` or ``unix:path``.
        types: Class that ``weft stubs`` wrote; ``client: Client = weft.connect(...)`` has the same effect.
        **options: See ``ConnectOptions``.

    Raises:
        InvalidArgumentError: An argument or file is wrong.
    """
    make: Any = types or Client
    made: ClientType = make(address, **options)
    return made


def connect_async(
    address: str, types: type[AsyncClientType] | None = None, **options: Unpack[ConnectOptions]
) -> AsyncClientType:
    """Like ``connect``, for asyncio: ``await client.NAME(...)``, ``async for answer in client.NAME.stream(...)``."""
    make: Any = types or AsyncClient
    made: AsyncClientType = make(address, **options)
    return made
