"""``AsyncClient``: calls graphs and models by name, with values in place of tensors."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypedDict, Unpack

from numpy.typing import ArrayLike
from typing_extensions import TypeVar

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
from weft.base.validation import rows_of, scheduling_parameters
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
    """A call as its caller wrote it: ``values`` are the inputs, by name."""

    def __init__(self, client: "AsyncClient", values: Mapping[str, Any]) -> None:
        given = {name: values[name] for name in values if name in CallOptions.__annotations__}
        self._options: CallOptions = given  # type: ignore[assignment]  # whose types the following checks
        named = {name: value for name, value in values.items() if name not in given} | given.get("inputs", {})
        self.values = {name: value for name, value in named.items() if value is not None}
        self.timeout_s = _checked_timeout_s(given.get("timeout_s", client._timeout_s))
        self._deadline_s = None if self.timeout_s is None else asyncio.get_running_loop().time() + self.timeout_s
        self.metadata = tuple((client._headers | _checked_headers(given.get("headers", {}))).items())
        own = {name: given[name] for name in _PARAMETERS if name in given}
        self._parameters = {**given.get("parameters", {}), **own}
        scheduling_parameters(self._parameters)
        self._address = client._address

    def left_s(self) -> float | None:
        """Time to the deadline in seconds."""
        if self._deadline_s is None:
            return None
        return max(self._deadline_s - asyncio.get_running_loop().time(), 0.001)

    def call(self, name: str, signature: ModelSignature, *, is_stream: bool) -> InferCall:
        """The call to send. Raises InvalidArgumentError: a name, datatype or shape does not fit the signature."""
        specs = {spec.name: spec for spec in signature.inputs}
        for key in self.values:
            if key not in specs:
                takes = ", ".join(f"{s.name} {s.datatype}{list(signature.full_shape(s))}" for s in specs.values())
                hint = suggestion(key, [*specs, *CallOptions.__annotations__]).partition("; use one of")[0]
                raise InvalidArgumentError(f"'{name}' has no input '{key}'{hint}; it takes {takes or 'none'}")
        if signature.is_decoupled and not (is_stream or signature.can_collect):
            text = f"for answer in client.models['{name}'].stream(...)"
            raise InvalidArgumentError(f"'{name}' sends any number of responses; read them with a loop: {text}")
        has_batch = signature.max_batch_size > 0
        inputs = {
            key: tensor_of(value, specs[key].datatype, specs[key].dims, name=key, has_batch=has_batch)
            for key, value in self.values.items()
        }
        wanted = self._options.get("outputs", ())
        outputs = tuple(RequestedOutput(output, {}) for output in ((wanted,) if isinstance(wanted, str) else wanted))
        request_id = str(self._options.get("request_id", ""))
        call = InferCall(name, signature.version, request_id, self._parameters, inputs, outputs)
        rows_of(call, signature, can_split=True)
        return call

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the server as those of their class."""
        late = f"'{self._address}' did not answer within {self.timeout_s} s; timeout_s allows longer"
        try:
            yield
        except RemoteError as error:
            raise (error.with_message(late) if error.message == _LATE else error).of_its_class() from None
        except TimeoutError:
            raise DeadlineExceededError(late) from None


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
        self._client = client
        self.name = name
        self.version = version

    async def __call__(self, /, **values: Any) -> Any:
        """The ``Answer``. Cancelling the awaiting task cancels the request."""
        async with aclosing(self._answers(values, is_stream=False)) as answers:
            return await anext(answers)

    def stream(self, /, **values: Any) -> AsyncGenerator[Any, None]:
        """Yield each response as an ``Answer``, when it arrives; a model that is not decoupled has one.

        The request is sent when the first is asked for. Closing the generator cancels it.
        """
        return self._answers(values, is_stream=True)

    async def _answers(self, values: Mapping[str, Any], *, is_stream: bool) -> AsyncGenerator[Answer, None]:
        request, trailer, has_begun = _Request(self._client, values), dict[str, str](), False
        with request.errors():
            for is_last in (False, True):
                client = self._client._v2_client()
                signature = await self._client._signature(self.name, self.version, request)
                try:
                    call = request.call(self.name, signature, is_stream=is_stream)
                    sending: dict[str, Any] = {"timeout_s": request.left_s(), "metadata": request.metadata}
                    if not is_stream:
                        yield Answer(await client.infer(call, trailer=trailer, **sending), trailer)
                        return
                    async with aclosing(client.stream(call, **sending)) as results:
                        async for result in results:
                            has_begun = True
                            if not result.is_null:
                                yield Answer(result, trailer)
                    return
                except WeftError as error:
                    if is_last or has_begun or not await self._has_changed(signature, request, error):
                        raise

    async def _has_changed(self, signature: ModelSignature, request: _Request, error: WeftError) -> bool:
        if error.code not in (InvalidArgumentError.code, NotFoundError.code):
            return False
        with suppress(WeftError, TimeoutError):
            return signature != await self._client._signature(self.name, self.version, request, is_fresh=True)
        return False


Model_ = TypeVar("Model_")


class ModelTable(Generic[Model_]):
    """Models whose names are no identifiers, or of one version: ``models["my-model"]``, ``models["readings", "2"]``."""

    def __init__(self, model: Callable[[str, str], Model_], names: Callable[[], Any]) -> None:
        self._model = model
        self._names = names

    def __getitem__(self, key: str | tuple[str, str | int]) -> Model_:
        name, version = (key, "") if isinstance(key, str) else key
        return self._model(name, str(version))

    def names(self) -> Any:
        """Names of the models that are ready; to be awaited if the client is asynchronous."""
        return self._names()

    __iter__ = None  # or a loop would call __getitem__ with numbers


class AsyncClient:
    """A client for one event loop: ``await client.NAME(INPUT=value)``, see ``AsyncModel``.

    It connects at the first call, and again whenever the connection is lost. ``client.models`` has models by any name.

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
            raise InvalidArgumentError(
                f"address '{address}' is not of the form host:port (without http://) or unix:path"
            )
        cert, key, ca, key_file = (
            None if (file := options.get(name)) is None else Path(str(file))
            for name in ("tls_cert", "tls_key", "tls_ca", "key_file")
        )
        security = ChannelSecurity(TlsFiles(cert, key, ca), options.get("tls_name", ""), key_file)
        security.check()
        self._security = None if security.is_plain else security
        self._address = address
        self._timeout_s = _checked_timeout_s(options.get("timeout_s", _TIMEOUT_S))
        self._headers = _checked_headers(options.get("headers", {}))
        self._v2: V2Client | None = None
        self._is_closed = False
        self._signatures: dict[tuple[str, str], ModelSignature] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getattr__(self, name: str) -> AsyncModel:
        return self.models[public(name)]

    @property
    def models(self) -> ModelTable[AsyncModel]:
        """Models by name, or name and version."""
        return ModelTable(partial(AsyncModel, self), self._names)

    async def close(self) -> None:
        """Cancel calls in flight and close the connection; further calls raise UnavailableError."""
        self._is_closed = True
        if self._v2 is not None:
            await self._v2.close()

    def _v2_client(self) -> V2Client:
        if self._is_closed:
            raise closed(self._address)
        if self._v2 is None:
            self._v2 = V2Client(self._address, security=self._security)
        return self._v2

    async def _signature(self, name: str, version: str, request: _Request, *, is_fresh: bool = False) -> ModelSignature:
        key = name, version
        async with asyncio.timeout(request.left_s()), self._locks.setdefault(key, asyncio.Lock()):
            if is_fresh or key not in self._signatures:
                self._signatures.pop(key, None)
                self._signatures[key] = await self._v2_client().signature(
                    name, version, timeout_s=request.left_s(), metadata=request.metadata
                )
            return self._signatures[key]

    async def _names(self) -> list[str]:
        found = await self._v2_client().index(ready_only=True, timeout_s=_LISTING_TIMEOUT_S)
        return list(dict.fromkeys(model.name for model in found))


def _checked_timeout_s(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidArgumentError(
            f"timeout_s must be a number of seconds above 0, or None for no deadline, got {value!r}"
        )
    return min(float(value), MAX_TIMEOUT_S)


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not is_metadata_name(name.lower()) or not (str(value).isascii() and str(value).isprintable()):
            form = "a name is of letters, digits, '_', '-' and '.', a value is ASCII"
            raise InvalidArgumentError(f"header {name!r}: {value!r} cannot be sent as metadata; {form}")
    return {name.lower(): str(value) for name, value in headers.items()}


def public(name: str) -> str:
    """The name of an attribute, if it can be that of a model; else AttributeError."""
    if name.startswith("_"):
        raise AttributeError(name)
    return name


def closed(address: str) -> UnavailableError:
    """The error of a call after ``close``."""
    return UnavailableError(f"the client of '{address}' is closed; connect again")
