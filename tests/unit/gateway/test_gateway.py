"""The parts between an HTTP request and the router, each by itself."""

import asyncio
import json
from typing import Any

import pytest

from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.gateway.errors import RequestError, error_response
from weft.gateway.http.responding import ClientDisconnectedError, run_until_disconnect
from weft.gateway.openai.endpoint import Models
from weft.gateway.openai.text_model import TextModel
from weft_protos.grpc_service_pb2 import RepositoryIndexResponse
from weft_protos.model_config_pb2 import ModelConfig


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (RequestError("m", param="p", code="c", http_status=413), 413, "c", {}),
        (NotFoundError("m"), 404, "model_not_found", {}),
        (RemoteError("UNAUTHENTICATED", "m"), 401, "invalid_api_key", {"www-authenticate": "Bearer"}),
        (RemoteError("PERMISSION_DENIED", "m"), 403, "permission_denied", {}),
        (ResourceExhaustedError("m"), 429, "rate_limit_exceeded", {}),
        (
            RemoteError("RESOURCE_EXHAUSTED", "m", retry_after_ms=10),
            429,
            "rate_limit_exceeded",
            {"retry-after": "1", "retry-after-ms": "10"},
        ),
        (UnsupportedError("m"), 501, "not_supported", {}),
        (UnavailableError("m"), 503, "unavailable", {}),
        (DeadlineExceededError("m"), 504, "deadline_exceeded", {"x-should-retry": "false"}),
        (InternalError("m", error_id="7f"), 500, "internal_error", {"x-error-id": "7f"}),
        (RemoteError("DATA_LOSS", "m"), 500, "internal_error", {}),
    ],
)
def test_errors_have_their_status(error: WeftError, status: int, code: str, headers: dict[str, str]) -> None:
    """One table, by the name of the gRPC status."""
    answer = error_response(error)
    body = json.loads(answer.body)["error"]
    own_headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
    assert (status, code, error.message, headers) == (answer.status_code, body["code"], body["message"], own_headers)


class Router:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def config(self, name: str, *, metadata: Any, **_: Any) -> ModelConfig:
        self.asked.append((name, metadata))
        if name == "gone":
            raise RemoteError("NOT_FOUND", "Request for unknown model: 'gone' is not found")
        if name == "secret":
            raise RemoteError("PERMISSION_DENIED", "no")
        config = ModelConfig(name=name)
        config.input.add(name="text_input" if name == "text" else "X", dims=[1])
        config.output.add(name="text_output", dims=[1])
        return config

    async def index(self, **_: Any) -> list[Any]:
        return [RepositoryIndexResponse.ModelIndex(name=name, state="READY") for name in ("text", "gone", "numbers")]


async def test_what_is_known_of_a_model_is_kept_for_its_caller() -> None:
    """For two seconds; another caller is asked for anew, and so is what failed."""
    now, router = [0.0], Router()
    models = Models(router, {}, clock_s=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(2):
        assert "text" == (await models.find(TextModel, "text", ())).name
    assert 1 == len(router.asked)
    await models.find(TextModel, "text", (("authorization", "x"),))
    now[0] = 1.9
    await models.find(TextModel, "text", ())
    assert 2 == len(router.asked)
    now[0] = 2.0
    await models.find(TextModel, "text", ())
    assert 3 == len(router.asked)
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            await models.find(TextModel, "gone", ())
        assert (404, "model_not_found") == (caught.value.http_status, caught.value.reason)
    with pytest.raises(RemoteError, match="no"):
        await models.find(TextModel, "secret", ())
    assert 8 == len(router.asked)  # "gone" may be an adapter of any other model, which are asked once
    assert {"text": [TextModel]} == await models.listed([TextModel], ())
    for number in range(3000):
        await models.find(TextModel, "text", (("authorization", str(number)),))
    assert len(models._cache) <= 1024


async def test_work_ends_when_its_client_leaves() -> None:
    """Or when the gateway must; work that is done first counts, and nothing is left running."""
    events: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    stopping, is_cancelled = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def done() -> int:
        return 7

    assert 7 == await run_until_disconnect(events.get, stopping, done())
    events.put_nowait({"type": "http.request"})
    events.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnectedError):
        await run_until_disconnect(events.get, stopping, endless())
    assert is_cancelled.is_set()
    is_cancelled.clear()
    stopping.set()
    with pytest.raises(UnavailableError, match="the gateway stops"):
        await run_until_disconnect(events.get, stopping, endless())
    assert is_cancelled.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
