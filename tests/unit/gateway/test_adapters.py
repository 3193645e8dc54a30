"""Names of adapters, as the gateway looks them up."""

import json
from typing import Any

import pytest
from tests.integration.talking import TalkerCore

from weft.base.core import IndexEntry, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.tensors import bytes_tensor
from weft.gateway.errors import RequestError
from weft.gateway.openai.endpoint import Models
from weft.gateway.openai.text_model import TextModel


class Router:
    """A router before one model, whose adapters are ``names``; counts how often it is asked for them."""

    def __init__(self) -> None:
        self.names = ["sql"]
        self.num_asked = 0

    async def index(self, **options: Any) -> list[IndexEntry]:
        return [IndexEntry("talker", "1", "READY", "")]

    async def config(self, name: str, **options: Any) -> Any:
        if name != "talker":
            raise RemoteError("NOT_FOUND", "unknown")
        config = TalkerCore().config(name, "")
        config.parameters["max_loras"].string_value = "2"
        return config

    async def infer(self, call: InferCall, **options: Any) -> InferResult:
        self.num_asked += 1
        listed = json.dumps([{"name": name, "path": name} for name in self.names])
        return InferResult("talker", "1", outputs={"lora_adapters": bytes_tensor([listed], (1,))})


async def test_unknown_names_ask_the_models_for_adapters_once() -> None:
    """For some seconds, until an adapter is loaded, so that wrong names cost nothing."""
    router, now_s = Router(), 0.0
    models = Models(router, {}, clock_s=lambda: now_s)  # type: ignore[arg-type]
    for name in ("nope", "none", "law", "nope"):
        with pytest.raises(RequestError, match="does not exist"):
            await models.find(TextModel, name, ())
    assert 1 == router.num_asked
    router.names.append("law")
    models.forget_adapters()
    assert "law" == (await models.find(TextModel, "law", ())).adapter
    now_s = 10.0
    router.names.clear()
    with pytest.raises(RequestError, match="does not exist"):
        await models.find(TextModel, "law", ())
    assert 3 == router.num_asked
