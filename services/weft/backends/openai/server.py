"""Calls another server over HTTP, and turns what goes wrong into errors with a gRPC status."""

import asyncio
import contextlib
import json
import math
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from weft.backends.openai.settings import Settings
from weft.base.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)

#: Idle connections are closed sooner than servers close them: uvicorn after 5 s, nginx after 75 s.
_KEEP_ALIVE_S = 4.0
_PROBE_TIMEOUT_S = 5.0
#: Of the other server's error in ours.
_MAX_MESSAGE_CHARS = 500
_MAX_ERROR_BYTES = 16384
#: Response header with the client's time in seconds, which Weft's gateway knows.
_TIMEOUT_HEADER = "x-request-timeout"


class ForeignServer:
    """A server that speaks OpenAI's protocol; create it on the event loop that uses it.

    Attributes:
        num_failures: Requests in a row that the server did not answer, or answered with a status from 500 on.
    """

    def __init__(self, settings: Settings, model: str) -> None:
        self._settings = settings
        self._where = f"the server of model '{model}', {settings.url},"
        self.num_failures = 0
        context: ssl.SSLContext | bool = True
        if settings.url.startswith("https"):
            try:
                context = ssl.create_default_context(cafile=settings.tls_ca or None)
                if settings.tls_cert:
                    context.load_cert_chain(settings.tls_cert, settings.tls_key)
            except OSError as error:
                raise InvalidArgumentError(f"model '{model}': tls_ca, tls_cert or tls_key: {error}") from None
        timeouts = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=settings.max_requests, ssl=context, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=30
            ),
            timeout=timeouts,
            read_bufsize=settings.max_response_bytes // 2,  # a line may have twice as many bytes
            headers={"authorization": f"Bearer {settings.key}"} if settings.key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def probe(self) -> None:
        """Check that the server answers. Raises UnavailableError."""
        deadline_ns = time.monotonic_ns() + int(_PROBE_TIMEOUT_S * 1e9)
        url = f"{self._settings.url}/models"
        async with self._failures(deadline_ns), self._session.get(url, allow_redirects=False) as response:
            if response.status >= 500:
                raise UnavailableError(f"{self._where} answers GET /models with HTTP status {response.status}")
        self.num_failures = 0

    async def answer(self, path: str, body: Mapping[str, Any], *, request_id: str, deadline_ns: int | None) -> Any:
        """The JSON object that answers a body. Raises a WeftError; cancelling closes the connection."""
        async with self._failures(deadline_ns), self._post(path, body, request_id, deadline_ns) as response:
            data, most = bytearray(), self._settings.max_response_bytes
            async for part in response.content.iter_any():
                data += part
                if len(data) > most:
                    raise UnavailableError(
                        f"{self._where} answers with more than {most} bytes, parameter 'max_response_bytes'"
                    )
            return self._parsed(bytes(data))

    async def events(
        self, path: str, body: Mapping[str, Any], *, request_id: str, deadline_ns: int | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the JSON object of each server-sent event. Raises a WeftError, also for a stream without an end."""
        async with self._failures(deadline_ns), self._post(path, body, request_id, deadline_ns) as response:
            async for line in response.content:
                name, _, value = line.partition(b":")
                if name != b"data":
                    continue  # a comment, or a field that says nothing here
                if (value := value.strip()) == b"[DONE]":
                    return
                event = self._parsed(value)
                if "error" in event:
                    raise self._error_of(_status_in(event), event, {})
                yield event
            raise UnavailableError(f"{self._where} broke off its stream before its end")

    @contextlib.asynccontextmanager
    async def _post(
        self, path: str, body: Mapping[str, Any], request_id: str, deadline_ns: int | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"x-request-id": request_id} if request_id.isascii() and request_id.isprintable() else {}
        if deadline_ns is not None:
            headers[_TIMEOUT_HEADER] = f"{max(0.001, (deadline_ns - time.monotonic_ns()) / 1e9):.3f}"
        url = self._settings.url + path
        async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
            if response.status < 500:
                self.num_failures = 0
            if response.status == 200:
                yield response
                return
            data = await response.content.read(_MAX_ERROR_BYTES)
            try:
                said = json.loads(data)
            except (ValueError, RecursionError):
                said = None
            raise self._error_of(response.status, said, response.headers)

    @contextlib.asynccontextmanager
    async def _failures(self, deadline_ns: int | None) -> AsyncIterator[None]:
        """Turn what aiohttp raises into a WeftError, and count the failures."""
        loop = asyncio.get_running_loop()
        end_s = None if deadline_ns is None else loop.time() + (deadline_ns - time.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout_at(end_s):
                yield
        except Exception as error:
            failure = self._failure_of(error)
            self.num_failures += isinstance(failure, UnavailableError)
            raise failure from None

    def _failure_of(self, error: Exception) -> Exception:
        match error:
            case aiohttp.ServerTimeoutError():
                return UnavailableError(f"{self._where} is silent: {error}")
            case TimeoutError():
                return DeadlineExceededError(f"{self._where} did not answer within the deadline")
            case aiohttp.ClientConnectorError():
                return UnavailableError(f"{self._where} cannot be reached: {error}").refused()
            case aiohttp.ClientError() | aiohttp.http_exceptions.HttpProcessingError() | OSError() | ValueError():
                return UnavailableError(f"{self._where} broke off: {self._shown(error) or type(error).__name__}")
        return error

    def _parsed(self, data: bytes) -> Any:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UnavailableError(f"{self._where} answers with what is no JSON object: {self._shown(data)[:80]}")
        return value

    def _error_of(self, status: int, said: Any, headers: Mapping[str, str]) -> WeftError:
        """The error for an HTTP status; the key is no part of it, even if the server sends it back."""
        error = said.get("error", said) if isinstance(said, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = f"HTTP status {status}{f': {self._shown(message)}' if message else ''}"
        variable = self._settings.key_variable
        match status:
            case 401 | 403:
                cure = f"correct the key in the environment variable '{variable}'" if variable else "set 'api_key_env'"
                return FailedPreconditionError(f"{self._where} refuses Weft's key with {text}; {cure}")
            case 404:
                model = self._settings.model
                return FailedPreconditionError(f"{self._where} has no model '{model}', or not this path, with {text}")
            case 400 | 413 | 415 | 422:
                return InvalidArgumentError(f"{self._where} refuses the request with {text}")
            case 429:
                retry_after_ms = _retry_after_ms(headers)
                return ResourceExhaustedError(f"{self._where} is at a limit with {text}", retry_after_ms=retry_after_ms)
            case 501:
                return UnsupportedError(f"{self._where} cannot do this, with {text}")
            case _ if 300 <= status < 400:
                return FailedPreconditionError(f"{self._where} redirects with {text}; correct parameter 'base_url'")
        unavailable = UnavailableError(f"{self._where} fails with {text}")
        unavailable.retry_after_ms = _retry_after_ms(headers)  # type: ignore[attr-defined]  # sent if it is there
        return unavailable

    def _shown(self, said: object) -> str:
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        if self._settings.key:
            text = text.replace(self._settings.key, "***")
        return text.strip()[:_MAX_MESSAGE_CHARS]


def _status_in(event: Any) -> int:
    """The HTTP status that an error inside of a stream means."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 600:
        return code
    kind = error.get("type") if isinstance(error, dict) else ""
    return {"invalid_request_error": 400, "BadRequestError": 400, "rate_limit_error": 429}.get(str(kind), 500)


def _retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """When to ask again, by ``retry-after-ms`` or ``retry-after`` (seconds or a date); None: not said."""
    try:
        if text := headers.get("retry-after-ms"):
            wait_ms = float(text)
        elif text := headers.get("retry-after"):
            wait_ms = 1000 * (
                float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
            )
        else:
            return None
    except (ValueError, TypeError):
        return None
    return math.ceil(min(max(wait_ms, 0.0), 86_400_000.0)) if math.isfinite(wait_ms) else None
