"""``connect`` and ``connect_async``; ``Client``, which runs an ``AsyncClient`` for any number of threads."""

import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, Self, Unpack, cast

from typing_extensions import TypeVar

from weft.base.errors import WeftError
from weft.base.processes.loop_thread import LoopThread
from weft.v2.client.aio import AsyncClient, AsyncModel, ConnectOptions, closed

#: Held while a client starts, begins a call or closes; reentrant, as a stream may be collected as garbage meanwhile.
_LOCK = threading.RLock()


class Model:
    """One graph or model of a ``Client``; calls block. Inputs, options and errors are those of ``AsyncModel``."""

    def __init__(self, client: "Client", *name: str) -> None:
        self._client, self._name = client, name

    def __call__(self, *args: Any, **values: Any) -> Any:
        """The ``Answer``. KeyboardInterrupt cancels the request."""
        return self._client._result(lambda client: AsyncModel(client, *self._name)(*args, **values))

    def stream(self, *args: Any, **values: Any) -> Generator[Any, None, None]:
        """Yield each response as an ``Answer``, when it arrives; closing the generator cancels the request."""
        answers: AsyncGenerator[Any, None] | None = None

        async def following(client: AsyncClient) -> Any:
            nonlocal answers
            answers = answers or AsyncModel(client, *self._name).stream(*args, **values)
            return await anext(answers, None)

        async def ending(_: AsyncClient) -> None:
            if answers is not None:
                await answers.aclose()

        try:
            while (answer := self._client._result(following)) is not None:
                yield answer
        finally:
            with suppress(WeftError):  # a closed client has cancelled it
                self._client._begin(ending)


class Client:
    """A client that blocks, for any number of threads: ``client.NAME(INPUT=value)``.

    Arguments and names of models are those of ``AsyncClient``, calls those of ``Model``. It works on a thread of its
    own, which starts at the first call, after a fork anew, and ends with ``close``, the ``with`` block or the client.
    """

    def __init__(self, address: str, **options: Unpack[ConnectOptions]) -> None:
        self._make = partial(AsyncClient, address, **options)
        self._make()  # raises what is wrong
        self._address, self._is_closed = address, False
        self._running: tuple[LoopThread, AsyncClient] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Model:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str | tuple[str, str | int]) -> Model:
        return Model(self, *((name,) if isinstance(name, str) else map(str, name)))

    def __dir__(self) -> list[str]:
        with suppress(WeftError):
            return [*super().__dir__(), *self.names()]
        return [*super().__dir__()]

    def names(self) -> list[str]:
        """Names of the graphs and models that are ready."""
        return list(self._result(AsyncClient.names))

    def close(self) -> None:
        """Cancel calls in flight and close the connection; further calls raise UnavailableError."""
        with _LOCK:
            self._is_closed = True
        if self._running is not None:
            self._running[0].stop()

    def _begin(self, work: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Future[Any]:
        with _LOCK:
            if self._is_closed:
                raise closed(self._address)
            if self._running is None or self._running[0].pid != os.getpid():
                client = self._make()
                self._running = LoopThread("weft-client", client.close), client
                weakref.finalize(self, self._running[0].stop)
            thread, client = self._running
            return thread.begin(work(client))

    def _result(self, work: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise closed(self._address) from None
        finally:
            future.cancel()


ClientType = TypeVar("ClientType", default=Client)
AsyncClientType = TypeVar("AsyncClientType", default=AsyncClient)


def connect(address: str, types: type[ClientType] | None = None, **options: Unpack[ConnectOptions]) -> ClientType:
    """Make a client of a router, or of any server of the V2 protocol; it connects at the first call.

    >>> with weft.connect(address) as client:
    ...     client.double(X=[1.5, 2]).Y.tolist()
    [[3.0], [4.0]]

    Args:
        address: ``host:port`` or ``unix:path``.
        types: For type checkers: the class that ``weft stubs`` wrote, as in ``client: Client = weft.connect(...)``.
        **options: See ``ConnectOptions``.

    Raises:
        InvalidArgumentError: An argument or file is wrong.
    """
    return cast(ClientType, Client(address, **options))


def connect_async(
    address: str, types: type[AsyncClientType] | None = None, **options: Unpack[ConnectOptions]
) -> AsyncClientType:
    """Like ``connect``, for asyncio: ``await client.NAME(...)``, ``async for answer in client.NAME.stream(...)``."""
    return cast(AsyncClientType, AsyncClient(address, **options))
