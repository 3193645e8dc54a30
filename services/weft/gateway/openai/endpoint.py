"""What an endpoint of OpenAI's interface is: a path, the kind of model that it is for, a parser and a responder."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from starlette.types import ASGIApp

from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft_protos.model_config_pb2 import ModelConfig


class ServedModel(Protocol):
    """A kind of model, such as text generation: how one is recognised, and what endpoints know of it.

    Attributes:
        lacks: Of another model, what it does not do and have; follows its name in the error.
    """

    lacks: ClassVar[str]

    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        """The model with this configuration; None: it is of another kind.

        Args:
            config: Configuration from the router.
            template_source: Chat template that overrides that of the configuration.
        """


class EndpointCall(NamedTuple):
    """What a responder has beside the parsed body and the model: router and limits, and the request's context."""

    resources: Resources
    context: RequestContext


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint: POST of a JSON object that names a model. Errors, metrics, limits and batches come with it.

    Attributes:
        path: Of its URL.
        model_kind: Models that it is for; ``/v1/models`` lists those of every endpoint.
        parse: Parses the body, given it and the headers: ``model`` of what it returns is the model's name. A function
            of a module, as large bodies are parsed in a process of its own. Raises RequestError.
        respond: The response to what was parsed, with that model. Cancelled when the client leaves.
    """

    path: str
    model_kind: type[ServedModel]
    parse: Callable[[bytes, Mapping[str, str]], Any]
    respond: Callable[[Any, Any, EndpointCall], Awaitable[ASGIApp]]
