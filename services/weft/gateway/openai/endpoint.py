"""``Endpoint``: path, kind of model, parser and responder of an OpenAI endpoint; and the look-up of models."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from starlette.types import ASGIApp

from weft.base.caching import ExpiringCache
from weft.base.errors import NotFoundError, RemoteError, WeftError
from weft.gateway.errors import RequestError, openai_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.json_text import parse_json
from weft.gateway.openai.fields import Field, Fields
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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint: POST of a JSON object that names a model. Errors, metrics, limits and batches are built in.

    Attributes:
        path: Of its URL.
        model_kind: The kind of its models; ``/v1/models`` lists those of every endpoint.
        parse: Parses the body's fields and headers to an object whose ``model`` is the model's name. A module-level
            function, because large bodies are parsed in another process. Raises RequestError. What it has not read is
            ignored, or refused with ``--strict-fields``.
        respond: Makes the response, given the parsed object and the model. Cancelled when the client leaves.
        fields: The fields of its body, for documentation.
        error_body: Formats an error.
        nothing_below: Why there is nothing at the paths below its own; "": no reason is given.
    """

    path: str
    model_kind: type[ServedModel]
    parse: Callable[[Fields, Mapping[str, str]], Any]
    respond: Callable[[Any, Any, EndpointCall], Awaitable[ASGIApp]]
    fields: tuple[Field, ...] = ()
    error_body: Callable[[WeftError], dict[str, Any]] = openai_body
    nothing_below: str = ""

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


class Models:
    """The models behind a router, as visible to each client; owned by the event loop.

    ``templates`` are chat template sources by model; they override those of the configurations.
    """

    def __init__(
        self, router: V2Client, templates: Mapping[str, str], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._templates = templates
        #: By kind, name and the caller's metadata, so that permissions are never shared between callers.
        self._cache = ExpiringCache[tuple[type[ServedModel], str, Metadata], Any](CACHE_TTL_S, _MAX_CACHED, clock_s)

    async def find(self, kind: type[Kind], name: str, metadata: Metadata) -> Kind:
        """Look up a model.

        Raises:
            RequestError: No such model (404), or it is of another kind (400).
            RemoteError: The router is unreachable, or the key does not allow access.
        """
        try:
            model = await self._lookup(kind, name, metadata)
        except RemoteError as error:
            if error.code == NotFoundError.code:
                raise _no_such_model(name) from error
            raise
        if model is None:
            raise RequestError(
                f"the model '{name}' {kind.lacks}; GET /v1/models lists those that have them", param="model"
            )
        return model

    async def names(self, kinds: Collection[type[ServedModel]], metadata: Metadata) -> Sequence[str]:
        """Names of the ready models of these kinds that the caller may use. Raises RemoteError."""
        names = await self._ready(metadata)
        free = asyncio.Semaphore(_MAX_LOOKUPS)

        async def is_of_kinds(name: str) -> bool:
            async with free:
                try:
                    for kind in kinds:
                        if await self._lookup(kind, name, metadata) is not None:
                            return True
                    return False
                except RemoteError as error:
                    if error.code == NotFoundError.code:  # unloaded in the meantime
                        return False
                    raise

        found = await asyncio.gather(*map(is_of_kinds, names))
        return [name for name, is_listed in zip(names, found, strict=True) if is_listed]

    async def check_listed(self, name: str, kinds: Collection[type[ServedModel]], metadata: Metadata) -> None:
        """Check that the model is listed. Raises RequestError (404) or RemoteError."""
        if name not in await self.names(kinds, metadata):
            raise _no_such_model(name)

    async def _ready(self, metadata: Metadata) -> list[str]:
        index = await self._router.index(ready_only=True, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
        return list(dict.fromkeys(entry.name for entry in index if entry.state == "READY"))

    async def _lookup(self, kind: type[Kind], name: str, metadata: Metadata) -> Kind | None:
        async def ask() -> Kind | None:
            config = await self._router.config(name, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
            return kind.from_config(config, self._templates.get(name))

        found: Kind | None = await self._cache.get((kind, name, metadata), ask)
        return found


def _no_such_model(name: str) -> RequestError:
    return RequestError(
        f"The model `{name}` does not exist or is not served; GET /v1/models lists what is",
        param="model",
        code="model_not_found",
        http_status=404,
    )
