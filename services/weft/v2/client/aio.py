"""``AsyncClient``: calls graphs and models by name, with values in place of tensors."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from numpy.typing import ArrayLike

from weft.base.core import InferCall, ParameterValue, RequestedOutput
from weft.base.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    RemoteError,
    UnavailableError,
    WeftError,
)
from weft.base.signature import ModelSignature
from weft.base.tensors import tensor_of
from weft.base.text.argument_types import is_metadata_name
from weft.base.text.suggestion import suggestion
from weft.base.validation import scheduling_parameters, validate
from weft.v2.client.answer import Answer
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import ChannelSecurity
from weft.v2.security.tls import TlsFiles

#: gRPC's own text when the deadline passes at this end.
_LATE = "Deadline Exceeded"
_TIMEOUT_S = 60.0
_LISTING_TIMEOUT_S = 2.0
#: Options that are request parameters.
_PARAMETERS = ("priority", "sequence_id", "sequence_start", "sequence_end")


class ConnectOptions(TypedDict, total=False):
    """Options of a client.

    Attributes:
        timeout_s: Default deadline of a call in seconds; None: none. Default: 60.
        headers: Metadata of every call.
        tls_ca: PEM file of the CA that issued the server's certificate; None: plaintext.
        tls_cert: PEM file of a certificate to show.
        tls_key: PEM file of its private key.
        tls_name: Name in the server's certificate; default: the host.
        key_file: File whose first line is the key to send. Changes of all these files are followed.
    """

    timeout_s: float | None
    headers: Mapping[str, str]
    tls_ca: str | Path | None
    tls_cert: str | Path | None
    tls_key: str | Path | None
    tls_name: str
    key_file: str | Path | None


class CallOptions(TypedDict, total=False):
    """Keywords of a call that are no inputs.

    Attributes:
        inputs: Inputs by name, for names that are no identifiers or those of options.
        outputs: Names of the outputs to ask for; default: all.
        timeout_s: Deadline of the call, of a stream up to its end, in seconds; None: none. Default: the client's.
        priority: 1 is the most urgent; 0: the model's default.
        headers: Metadata, beside the client's.
        parameters: Request parameters.
        request_id: Returned with the answer; logs and traces have it.
        sequence_id: Of a stateful model, with ``sequence_start`` in the first request and ``sequence_end`` in the last.
    """

    inputs: Mapping[str, ArrayLike]
    outputs: Sequence[str]
    timeout_s: float | None
    priority: int
    headers: Mapping[str, str]
    parameters: Mapping[str, ParameterValue]
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


class _Request:
    """A call as its caller wrote it, with its deadline."""

    def __init__(self, client: "AsyncClient", values: Mapping[str, Any]) -> None:
        self._options: dict[str, Any] = {name: values[name] for name in values if name in CallOptions.__annotations__}
        given = self._options.get
        named = {name: value for name, value in values.items() if name not in self._options} | given("inputs", {})
        self._values = {name: value for name, value in named.items() if value is not None}
        timeout_s = _checked_timeout_s(given("timeout_s", client._timeout_s))
        self.late = f"'{client._address}' did not answer within {timeout_s} s; timeout_s allows longer"
        self._deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self.metadata = tuple((client._headers | _checked_headers(given("headers", {}))).items())
        own = {name: self._options[name] for name in _PARAMETERS if name in self._options}
        self._parameters = {**given("parameters", {}), **own}
        scheduling_parameters(self._parameters)

    def sending(self) -> dict[str, Any]:
        """Keywords for a call of ``V2Client``."""
        now_s = asyncio.get_running_loop().time()
        left_s = None if self._deadline_s is None else max(self._deadline_s - now_s, 0.001)
        return {"timeout_s": left_s, "metadata": self.metadata}

    def call(self, name: str, signature: ModelSignature, *, is_stream: bool) -> InferCall:
        """The call to send. Raises InvalidArgumentError: a name, datatype or shape does not fit the signature."""
        specs = {spec.name: spec for spec in signature.inputs}
        inputs = {}
        for key, value in self._values.items():
            if key not in specs:
                takes = ", ".join(f"{s.name} {s.datatype}{list(signature.full_shape(s))}" for s in specs.values())
                hint = suggestion(key, [*specs, *CallOptions.__annotations__]).partition("; use one of")[0]
                raise InvalidArgumentError(f"'{name}' has no input '{key}'{hint}; it takes {takes or 'none'}")
            has_batch = signature.max_batch_size > 0
            inputs[key] = tensor_of(value, specs[key].datatype, specs[key].dims, name=key, has_batch=has_batch)
        if signature.is_decoupled and not (is_stream or signature.can_collect):
            text = f"for answer in client['{name}'].stream(...)"
            raise InvalidArgumentError(f"'{name}' sends any number of responses; read them with a loop: {text}")
        wanted = self._options.get("outputs", ())
        outputs = tuple(RequestedOutput(output, {}) for output in ((wanted,) if isinstance(wanted, str) else wanted))
        request_id = str(self._options.get("request_id", ""))
        call = InferCall(name, signature.version, request_id, self._parameters, inputs, outputs)
        try:
            validate(call, signature, can_split=True)
        except InvalidArgumentError as error:
            raise error.with_message(error.message.partition("] ")[2]) from None  # without the id of the request
        return call


class AsyncModel:
    """One graph or model of an ``AsyncClient``; calls are awaited.

    Keywords of a call are inputs, and the options of ``CallOptions``. A number, a text or a list of them becomes a
    tensor of the input's datatype; it may lack the batch dimension, and where a row has one element, a flat list has a
    row in each. A numpy array is sent as it is, and None not at all. All is checked against the signature, which the
    client asks for once, and again when the model seems to have changed.

    Raises:
        InvalidArgumentError: A name, datatype or shape is wrong; if the model is as it was, nothing was sent.
        WeftError: The server's error, of the class in ``weft.errors`` that its status has. DeadlineExceededError: the
            deadline passed; UnavailableError: the server is away, or the client closed.
    """

    def __init__(self, client: "AsyncClient", name: str, version: str = "") -> None:
        self._client, self.name, self.version = client, name, version

    async def __call__(self, *args: Any, **values: Any) -> Any:
        """The ``Answer``. Cancelling the awaiting task cancels the request."""
        async with aclosing(self._answers(args, values, is_stream=False)) as answers:
            return await anext(answers)

    def stream(self, *args: Any, **values: Any) -> AsyncGenerator[Any, None]:
        """Yield each response as an ``Answer``, when it arrives; a model that is not decoupled has one.

        The request is sent when the first is asked for. Closing the generator cancels it.
        """
        return self._answers(args, values, is_stream=True)

    async def _answers(
        self, args: Sequence[Any], values: Mapping[str, Any], *, is_stream: bool
    ) -> AsyncGenerator[Answer, None]:
        if args:
            raise InvalidArgumentError(f"inputs of '{self.name}' are keywords: NAME=value")
        request, trailer, has_begun = _Request(self._client, values), dict[str, str](), False
        try:
            for is_last in (False, True):
                signature = await self._signature(request)
                client = self._client._connected()
                try:
                    call = request.call(self.name, signature, is_stream=is_stream)
                    if not is_stream:
                        yield Answer(await client.infer(call, trailer=trailer, **request.sending()), trailer)
                        return
                    async with aclosing(client.stream(call, **request.sending())) as results:
                        async for result in results:
                            has_begun = True
                            if not result.is_null:
                                yield Answer(result, trailer)
                    return
                except WeftError as error:
                    is_misfit = error.code in (InvalidArgumentError.code, NotFoundError.code)
                    if is_last or has_begun or not is_misfit or not await self._has_changed(signature, request, error):
                        raise
        except RemoteError as error:
            raise (error.with_message(request.late) if error.message == _LATE else error).of_its_class() from None
        except TimeoutError:
            raise DeadlineExceededError(request.late) from None

    async def _signature(self, request: _Request, *, is_fresh: bool = False) -> ModelSignature:
        known, key, sending = self._client._signatures, (self.name, self.version), request.sending()
        async with asyncio.timeout(sending["timeout_s"]), self._client._locks.setdefault(key, asyncio.Lock()):
            if is_fresh or key not in known:
                known.pop(key, None)
                known[key] = await self._client._connected().signature(*key, **sending)
            return known[key]

    async def _has_changed(self, signature: ModelSignature, request: _Request, error: WeftError) -> bool:
        try:
            return signature != await self._signature(request, is_fresh=True)
        except (WeftError, TimeoutError):
            if isinstance(error, RemoteError):
                return False  # what the server said first counts
            raise


class AsyncClient:
    """A client for one event loop: ``await client.NAME(INPUT=value)``, see ``AsyncModel``.

    ``client["my-model"]`` has models by any name, ``client["readings", "2"]`` those of a version. It connects at the
    first call, and again whenever the connection is lost.

    Args:
        address: ``host:port`` or ``unix:path``, or another address that gRPC resolves.
        **options: See ``ConnectOptions``.

    Raises:
        InvalidArgumentError: An argument or file is wrong.
    """

    def __init__(self, address: str, **options: Unpack[ConnectOptions]) -> None:
        if unknown := options.keys() - ConnectOptions.__annotations__.keys():
            raise TypeError(f"connect has no option {', '.join(map(repr, unknown))}")
        if ":" not in address or "://" in address.replace(":///", ""):
            raise InvalidArgumentError(f"address '{address}' must be host:port, without http://, or unix:path")
        cert, key, ca, key_file = (
            None if (file := options.get(name)) is None else Path(str(file))
            for name in ("tls_cert", "tls_key", "tls_ca", "key_file")
        )
        security = ChannelSecurity(TlsFiles(cert, key, ca), options.get("tls_name", ""), key_file)
        security.check()
        self._connect = partial(V2Client, address, security=None if security.is_plain else security)
        self._address = address
        self._timeout_s = _checked_timeout_s(options.get("timeout_s", _TIMEOUT_S))
        self._headers = _checked_headers(options.get("headers", {}))
        self._client: V2Client | None = None
        self._is_closed = False
        self._signatures: dict[tuple[str, str], ModelSignature] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getattr__(self, name: str) -> AsyncModel:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str | tuple[str, str | int]) -> AsyncModel:
        return AsyncModel(self, *((name,) if isinstance(name, str) else map(str, name)))

    async def names(self) -> list[str]:
        """Names of the graphs and models that are ready."""
        try:
            index = await self._connected().index(ready_only=True, timeout_s=_LISTING_TIMEOUT_S)
        except RemoteError as error:
            raise error.of_its_class() from None
        return list(dict.fromkeys(model.name for model in index))

    async def close(self) -> None:
        """Cancel calls in flight and close the connection; further calls raise UnavailableError."""
        self._is_closed = True
        if self._client is not None:
            await self._client.close()

    def _connected(self) -> V2Client:
        if self._is_closed:
            raise closed(self._address)
        self._client = self._client or self._connect()
        return self._client


def closed(address: str) -> UnavailableError:
    """The error of a call after ``close``."""
    return UnavailableError(f"the client of '{address}' is closed; connect again")


def _checked_timeout_s(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidArgumentError(f"timeout_s must be a number of seconds above 0, or None for none, got {value!r}")
    return min(float(value), MAX_TIMEOUT_S)


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not is_metadata_name(name.lower()) or not (str(value).isascii() and str(value).isprintable()):
            form = "a name is of letters, digits, '_', '-' and '.', a value is ASCII"
            raise InvalidArgumentError(f"header {name!r}: {value!r} cannot be sent as metadata; {form}")
    return {name.lower(): str(value) for name, value in headers.items()}
