"""``Endpoint``: path, kind of model, parser and responder of an HTTP endpoint; and the look-up of models."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from starlette.types import ASGIApp

from weft.base.caching import ExpiringCache
from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import NotFoundError, RemoteError, WeftError
from weft.base.tensors import split_bytes
from weft.gateway.errors import RequestError, openai_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.json_text import parse_json
from weft.gateway.openai.fields import Field, Fields
from weft.gateway.openai.text_model import TextModel
from weft.v2.client.v2_client import Metadata, V2Client
from weft_protos.model_config_pb2 import ModelConfig


class ServedModel(Protocol):
    """A kind of model, such as text generation: how to recognise one, and the data that endpoints need.

    Attributes:
        lacks: Error text for other models, after the model's name: the missing ability.
    """

    lacks: ClassVar[str]

    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        """The model with this configuration, None if it is of another kind.

        ``template_source`` replaces its chat template.
        """


class EndpointCall(NamedTuple):
    """Context of a responder, besides the parsed body and the model: router, limits, and the request's context."""

    resources: Resources
    context: RequestContext

    def timeout_s(self, asked_s: float | None) -> float:
        """Time for the answer, in seconds: the gateway's, or what the request asks for if that is less."""
        limit_s = self.resources.limits.timeout_s
        return min(asked_s or limit_s, limit_s)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint: POST of a JSON object that names a model. Errors, metrics, limits and batches are built in.

    Attributes:
        model_kind: The kind of its models; ``/v1/models`` lists those of every endpoint.
        parse: Parses the body's fields and headers to an object whose ``model`` is the model's name. A module-level
            function, because large bodies are parsed in another process. Raises RequestError. What it has not read is
            ignored, or refused with ``--strict-fields``.
        respond: Makes the response, given the parsed object and the model. Cancelled when the client leaves.
        fields: The fields of its body, for documentation.
        nothing_below: Why there is nothing at the paths below its own; "": no reason is given.
        operation: ``gen_ai.operation.name`` of its spans, in OpenTelemetry's conventions; "": it has none.
    """

    path: str
    model_kind: type[ServedModel]
    parse: Callable[[Fields, Mapping[str, str]], Any]
    respond: Callable[[Any, Any, EndpointCall], Awaitable[ASGIApp]]
    fields: tuple[Field, ...] = ()
    error_body: Callable[[WeftError], dict[str, Any]] = openai_body
    nothing_below: str = ""
    operation: str = ""

    def read(self, body: bytes, headers: Mapping[str, str], *, is_strict: bool = False) -> tuple[Any, Sequence[str]]:
        """Parse a body: the request, and the names of its fields without effect.

        Raises RequestError: no JSON object, or a field is invalid; if ``is_strict`` also for an unknown field.
        """
        fields = Fields(parse_json(body), is_strict=is_strict)
        request = self.parse(fields, headers)
        fields.finish()
        return request, tuple(fields.ignored)


Kind = TypeVar("Kind", bound=ServedModel)

#: How long the router has for a list or a configuration, in seconds.
LOOKUP_TIMEOUT_S = 5.0
#: Time to live of cached configurations, in seconds: the longest delay until a reload takes effect.
CACHE_TTL_S = 2.0
_MAX_CACHED = 1024
_MAX_LOOKUPS = 32
#: Output of a model: its adapters.
_ADAPTERS = "lora_adapters"


class Models:
    """The models behind a router, as visible to each client; owned by the event loop.

    ``templates`` are chat template sources by model; they override those of the configurations.
    """

    def __init__(
        self, router: V2Client, templates: Mapping[str, str], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._templates = templates
        self._num_changes = 0
        #: By kind, name and the caller's metadata, so that permissions are never shared between callers.
        self._cache = ExpiringCache[tuple[type[ServedModel], str, Metadata], Any](CACHE_TTL_S, _MAX_CACHED, clock_s)

    async def find(self, kind: type[Kind], name: str, metadata: Metadata) -> Kind:
        """Look up a model, also as ADAPTER or MODEL:ADAPTER; "" is the only one of its kind.

        Raises:
            RequestError: No such model (404), or it is of another kind (400).
            RemoteError: The router is unreachable, or the key does not allow access.
        """
        if not name:
            own = list(await self.listed([kind], metadata))
            if len(own) != 1:
                raise RequestError(f"'model' must name one of {', '.join(own) or 'no models'}", param="model")
            name = own[0]
        try:
            model = await self._lookup(kind, name, metadata)
        except RemoteError as error:
            if error.code != NotFoundError.code:
                raise
            model = await self._cache.get((kind, f":{name}", metadata), partial(self._adapted, kind, name, metadata))
        if model is None:
            raise RequestError(
                f"the model '{name}' {kind.lacks}; GET /v1/models lists those that have them", param="model"
            )
        return model

    async def listed(
        self, kinds: Collection[type[ServedModel]], metadata: Metadata
    ) -> Mapping[str, Collection[type[ServedModel]]]:
        """The ready models of these kinds that the caller may use, and the kinds of each. Raises RemoteError."""
        names = await self._ready(metadata)
        free = asyncio.Semaphore(_MAX_LOOKUPS)

        async def kinds_of(name: str) -> list[type[ServedModel]]:
            async with free:
                try:
                    return [kind for kind in kinds if await self._lookup(kind, name, metadata) is not None]
                except RemoteError as error:
                    if error.code == NotFoundError.code:  # unloaded in the meantime
                        return []
                    raise

        found = await asyncio.gather(*map(kinds_of, names))
        return {name: its for name, its in zip(names, found, strict=True) if its}

    async def adapters(self, names: Collection[str], metadata: Metadata) -> dict[str, tuple[str, str]]:
        """Models and folders of the adapters of these models, by name; one that is taken is MODEL:ADAPTER.

        Raises RemoteError.
        """
        found: dict[str, tuple[str, str]] = {}
        for name in names:
            with contextlib.suppress(RemoteError):  # unloaded in the meantime, or not ready
                model = await self._lookup(TextModel, name, metadata)
                if model is None or not model.has_adapters:
                    continue
                for adapter, path in await model_adapters(self._router, name, {}, LOOKUP_TIMEOUT_S, metadata):
                    is_taken = adapter in found or adapter in names
                    found[f"{name}:{adapter}" if is_taken else adapter] = name, path
        return found

    async def _adapted(self, kind: type[Kind], name: str, metadata: Metadata) -> Kind:
        """The model with an adapter that the name stands for. Raises as ``find``."""
        base, _, adapter = name.rpartition(":")
        if not base:  # of many unknown names only the first asks all models
            key = TextModel, f":{self._num_changes}:", metadata
            adapters = await self._cache.get(key, partial(self._all_adapters, metadata))
            base = adapters.get(name, ("", ""))[0]
        try:
            model = await self._lookup(kind, base, metadata) if base else None
        except RemoteError as error:
            if error.code != NotFoundError.code:
                raise
            model = None
        if not adapter or not isinstance(model, TextModel):
            raise no_such_model(name)
        return replace(model, adapter=adapter)

    async def _all_adapters(self, metadata: Metadata) -> dict[str, tuple[str, str]]:
        return await self.adapters(await self._ready(metadata), metadata)

    def forget_adapters(self) -> None:
        """Look adapters up anew for every client, after one was loaded or unloaded."""
        self._num_changes += 1

    async def _ready(self, metadata: Metadata) -> list[str]:
        index = await self._router.index(ready_only=True, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
        return list(dict.fromkeys(entry.name for entry in index if entry.state == "READY"))

    async def _lookup(self, kind: type[Kind], name: str, metadata: Metadata) -> Kind | None:
        async def ask() -> Kind | None:
            config = await self._router.config(name, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
            return kind.from_config(config, self._templates.get(name))

        found: Kind | None = await self._cache.get((kind, name, metadata), ask)
        return found


async def model_adapters(
    router: V2Client, model: str, parameters: Mapping[str, str], timeout_s: float, metadata: Metadata
) -> list[tuple[str, str]]:
    """Names and folders of a model's adapters, after the change that the parameters ask for. Raises RemoteError."""
    call = InferCall(model, parameters=parameters, outputs=(RequestedOutput(_ADAPTERS, {}),))
    result = await router.infer(call, timeout_s=timeout_s, metadata=metadata)
    listed = json.loads(split_bytes(result.outputs[_ADAPTERS].data, name=_ADAPTERS)[0])
    return [(one["name"], one["path"]) for one in listed]


def no_such_model(name: str) -> RequestError:
    """The error for a model that is not listed."""
    return RequestError(
        f"The model `{name}` does not exist or is not served; GET /v1/models lists what is",
        param="model",
        code="model_not_found",
        http_status=404,
    )
