"""``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter``: adapters of a model that serves; both off by default."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp
from typing_extensions import override

from weft.gateway.errors import RequestError
from weft.gateway.openai.endpoint import Endpoint, EndpointCall, model_adapters
from weft.gateway.openai.fields import Fields, string
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import MAX_MODEL_CHARS, TIMEOUT, timeout_s
from weft_protos.model_config_pb2 import ModelConfig

_LOAD, _UNLOAD = "load_lora_adapter", "unload_lora_adapter"
_MAX_PATH_CHARS = 4096


class AdapterModel(TextModel):
    """A text model that may have adapters."""

    lacks: ClassVar[str] = "has no adapters: it needs the parameter 'lora_adapters' or 'max_loras'"

    @override
    @classmethod
    def from_config(cls, config: ModelConfig, template_source: str | None = None) -> Self | None:
        found = super().from_config(config, template_source)
        return found if found is not None and found.has_adapters else None


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """A validated body; ``model`` "": the only one with adapters. ``parameters`` are those of the model's request."""

    model: str
    name: str
    parameters: Mapping[str, str]
    timeout_s: float | None


_NAME = string("lora_name", MAX_MODEL_CHARS, "the adapter, by which requests name it as `model`")
_PATH = string("lora_path", _MAX_PATH_CHARS, "its folder, within the model's `lora_root`")
_MODEL = string("model", MAX_MODEL_CHARS, "the model that it is of; without it the only one that may have adapters")


def parse(fields: Fields, headers: Mapping[str, str], wanted: Mapping[str, str]) -> AdapterRequest:
    """Parse a body; ``wanted``: its field for each parameter of the model's request. Raises RequestError."""
    own = fields.read((_NAME, _PATH, _MODEL))
    for field in wanted.values():
        if not own.get(field):
            raise RequestError(f"'{field}' is missing", param=field)
    parameters = {parameter: own[field] for parameter, field in wanted.items()}
    return AdapterRequest(own.get("model", ""), own["lora_name"], parameters, timeout_s(fields, headers))


async def _respond(request: AdapterRequest, model: AdapterModel, call: EndpointCall) -> ASGIApp:
    limit_s, metadata = call.timeout_s(request.timeout_s), call.context.metadata()
    await model_adapters(call.resources.router, model.name, request.parameters, limit_s, metadata)
    done = "added" if _LOAD in request.parameters else "removed"
    return PlainTextResponse(f"Success: LoRA adapter '{request.name}' {done} successfully.")


ENDPOINTS = (
    Endpoint(
        f"/v1/{_LOAD}",
        AdapterModel,
        partial(parse, wanted={_LOAD: "lora_name", "lora_path": "lora_path"}),
        _respond,
        (_NAME, _PATH, _MODEL, TIMEOUT),
    ),
    Endpoint(
        f"/v1/{_UNLOAD}",
        AdapterModel,
        partial(parse, wanted={_UNLOAD: "lora_name"}),
        _respond,
        (_NAME, _MODEL, TIMEOUT),
    ),
)
