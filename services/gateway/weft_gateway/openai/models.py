"""Which models there are, and what is known of each."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from weft_common.client.v2_client import Metadata, V2Client
from weft_common.errors import NotFoundError, RemoteError
from weft_gateway.errors import RequestError
from weft_gateway.openai.text_model import TextModel

#: How long the router has for a list or a configuration, in seconds.
LOOKUP_TIMEOUT_S = 5.0
#: How long a configuration is taken for the model's, in seconds: a reload is noticed after so long at the latest.
KEPT_S = 2.0
_MAX_KEPT = 1024
_MAX_LOOKUPS = 32


class Models:
    """The models behind a router, as each client may see them; owned by the event loop.

    Args:
        router: Whose models.
        templates: Source of a chat template by model, before that of its configuration.
        clock_s: Seconds that only grow.
    """

    def __init__(
        self, router: V2Client, templates: Mapping[str, str], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._templates = templates
        self._clock_s = clock_s
        #: By name and the caller's metadata, so that nobody learns by another's right; oldest first.
        self._kept: dict[tuple[str, Metadata], tuple[float, TextModel | None]] = {}

    async def find(self, name: str, metadata: Metadata) -> TextModel:
        """The model of that name.

        Raises:
            RequestError: There is none (404), or it is no text model (400).
            RemoteError: The router does not answer, or the key does not allow it.
        """
        try:
            model = await self._known(name, metadata)
        except RemoteError as error:
            if error.code == NotFoundError.code:
                raise _no_such_model(name) from error
            raise
        if model is None:
            raise RequestError(
                f"the model '{name}' does not take and give text: it needs the tensors text_input and text_output; GET "
                "/v1/models lists those that have them",
                param="model",
            )
        return model

    async def names(self, metadata: Metadata) -> Sequence[str]:
        """Of every text model that is ready and that the caller may use. Raises RemoteError."""
        names = await self._ready(metadata)
        free = asyncio.Semaphore(_MAX_LOOKUPS)

        async def is_text_model(name: str) -> bool:
            async with free:
                try:
                    return await self._known(name, metadata) is not None
                except RemoteError as error:
                    if error.code == NotFoundError.code:  # it went meanwhile
                        return False
                    raise

        found = await asyncio.gather(*map(is_text_model, names))
        return [name for name, is_listed in zip(names, found, strict=True) if is_listed]

    async def check_listed(self, name: str, metadata: Metadata) -> None:
        """The model is listed. Raises RequestError (404) or RemoteError."""
        if name not in await self.names(metadata):
            raise _no_such_model(name)

    async def _ready(self, metadata: Metadata) -> list[str]:
        """Names of the graphs and models that are READY and that the caller may use, each once, in order."""
        index = await self._router.index(ready_only=True, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
        return list(dict.fromkeys(entry.name for entry in index if entry.state == "READY"))

    async def _known(self, name: str, metadata: Metadata) -> TextModel | None:
        """What is known of the model; None: it is no text model. Raises RemoteError."""
        key = (name, metadata)
        now_s = self._clock_s()
        kept = self._kept.get(key)
        if kept is not None and now_s < kept[0]:
            return kept[1]
        config = await self._router.config(name, timeout_s=LOOKUP_TIMEOUT_S, metadata=metadata)
        model = TextModel.from_config(config, self._templates.get(name))
        self._kept.pop(key, None)
        while len(self._kept) >= _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = (self._clock_s() + KEPT_S, model)
        return model


def _no_such_model(name: str) -> RequestError:
    return RequestError(
        f"The model `{name}` does not exist or is not served; GET /v1/models lists what is",
        param="model",
        code="model_not_found",
        http_status=404,
    )
