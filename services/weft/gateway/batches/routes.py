"""Routes of OpenAI's files and batches."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError
from weft.gateway.batches.runner import BackgroundRunner, Store, check_requests
from weft.gateway.errors import RequestError
from weft.gateway.http.request_context import KEY_HEADERS, RequestContext
from weft.gateway.http.resources import BODY_TIMEOUT_S, Resources, too_large
from weft.gateway.http.responding import Handler
from weft.gateway.json_text import parse_json
from weft.jobs.atomic_files import held

FILES, BATCHES = "/v1/files", "/v1/batches"
#: Largest file, as with OpenAI.
MAX_FILE_BYTES = 200 << 20
#: Pause between two looks whether the process that is replaced has left the folder, in seconds.
_LOOK_S = 0.2
_WINDOW, _WINDOW_S = "24h", 86_400
_MAX_LIST, _DEFAULT_LIST, _MAX_DIGITS = 100, 20, 9


class Batches:
    """Files and batches in a folder, their runner and their handlers; each key sees only its own.

    Args:
        folder: Used by this process alone.
        endpoints: Paths that a batch may call.
        waits: Start only when the replaced process has released the folder; until then clients are told to retry.
    """

    def __init__(self, folder: Path, resources: Resources, endpoints: Sequence[str], *, waits: bool) -> None:
        self._folder = folder
        self._endpoints = endpoints
        self._resources = resources
        self._waits = waits
        self._held = contextlib.ExitStack()
        self._is_held = False
        self._beginning: asyncio.Task[None] | None = None
        self._app: ASGIApp | None = None
        try:
            if not waits:
                self._hold()
            self._store = Store(folder)
        except OSError as error:
            raise UnavailableError(f"--batch-dir: {error}") from error
        self._runner = BackgroundRunner(self._store, self._call)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each route."""
        handlers = (
            ("POST", FILES, self._upload),
            ("GET", FILES, partial(self._list, "file")),
            ("GET", FILES + "/{id}", self._file),
            ("DELETE", FILES + "/{id}", self._delete),
            ("GET", FILES + "/{id}/content", self._content),
            ("POST", BATCHES, self._create),
            ("GET", BATCHES, partial(self._list, "batch")),
            ("GET", BATCHES + "/{id}", self._batch),
            ("POST", BATCHES + "/{id}/cancel", self._cancel),
        )
        return [(method, path, self._when_held(handle)) for method, path, handle in handlers]

    async def start(self, app: ASGIApp) -> None:
        """Resume unfinished batches; ``app`` answers their requests."""
        self._app = app
        if self._waits:
            self._beginning = asyncio.create_task(self._begin_when_free())
        else:
            await self._runner.resume()

    async def close(self) -> None:
        """Stop; batches resume at the next start."""
        if self._beginning is not None:
            await cancel_and_wait((self._beginning,))
        await self._runner.close()
        self._held.close()

    def _hold(self) -> None:
        self._held.enter_context(held(self._folder))
        self._is_held = True

    async def _begin_when_free(self) -> None:
        while not self._is_held:
            with contextlib.suppress(UnavailableError):
                self._hold()
            await asyncio.sleep(_LOOK_S)
        await self._runner.resume()

    def _when_held(self, handle: Handler) -> Handler:
        async def checked(request: Request, context: RequestContext) -> ASGIApp:
            if not self._is_held:
                raise UnavailableError("the gateway before still ends what it does with files and batches; ask again")
            return await handle(request, context)

        return checked

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)

    async def _upload(self, request: Request, context: RequestContext) -> ASGIApp:
        owner = await self._owner(context)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                form = await MultiPartParser(request.headers, _limited(request.stream()), max_files=1).parse()
        except TimeoutError:
            raise RequestError(f"the body did not come within {BODY_TIMEOUT_S:g} s", http_status=408) from None
        except (MultiPartException, KeyError, AssertionError) as error:
            raise RequestError(f"the body must be multipart/form-data: {error or 'it has no boundary'}") from None
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise RequestError("the form has no 'file'", param="file")
        if purpose != "batch":
            raise RequestError(f"purpose must be 'batch', got {purpose!r}", param="purpose")
        facts = await asyncio.to_thread(self._keep, upload, owner)
        return JSONResponse(facts)

    def _keep(self, upload: UploadFile, owner: str) -> dict[str, Any]:
        temporary = self._store.path(f".{self._store.new_id('file')}")
        try:
            with temporary.open("wb") as target:
                while piece := upload.file.read(1 << 20):
                    target.write(piece)
            return self._store.add_file(temporary, upload.filename or "", "batch", owner)
        finally:
            temporary.unlink(missing_ok=True)
            upload.file.close()

    async def _file(self, request: Request, context: RequestContext) -> ASGIApp:
        return JSONResponse(await self._find("file", request, context))

    async def _delete(self, request: Request, context: RequestContext) -> ASGIApp:
        own_id = request.path_params["id"]
        await asyncio.to_thread(self._store.delete_file, own_id, await self._owner(context))
        return JSONResponse({"id": own_id, "object": "file", "deleted": True})

    async def _content(self, request: Request, context: RequestContext) -> ASGIApp:
        facts = await self._find("file", request, context)
        return FileResponse(self._store.content(facts["id"]), media_type="application/octet-stream")

    async def _create(self, request: Request, context: RequestContext) -> ASGIApp:
        body = b"".join(await self._resources.body(request, context, self._resources.limits.max_json_bytes))
        wanted = parse_json(body)
        owner = await self._owner(context)
        if (endpoint := wanted.get("endpoint")) not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise RequestError(f"endpoint must be one of {known}, got {endpoint!r}", param="endpoint")
        if (window := wanted.get("completion_window")) != _WINDOW:
            raise RequestError(f"completion_window must be '{_WINDOW}', got {window!r}", param="completion_window")
        file_id, metadata = wanted.get("input_file_id"), wanted.get("metadata")
        if not isinstance(file_id, str):
            raise RequestError(f"input_file_id must be the id of a file, got {file_id!r}", param="input_file_id")
        if metadata is not None and not isinstance(metadata, dict):
            raise RequestError("metadata must be an object", param="metadata")
        await asyncio.to_thread(self._store.find, file_id, "file", owner)
        batch = await asyncio.to_thread(self._make, file_id, str(endpoint), metadata, owner)
        self._runner.ensure(batch, owner, context.identity())
        return JSONResponse(batch)

    def _make(self, file_id: str, endpoint: str, metadata: Any, owner: str) -> dict[str, Any]:
        now = int(time.time())
        count, errors = check_requests(Path(self._store.content(file_id)), endpoint)
        batch = {
            "id": self._store.new_id("batch"),
            "object": "batch",
            "endpoint": endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": file_id,
            "completion_window": _WINDOW,
            "status": "failed" if errors else "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None if errors else now,
            "failed_at": now if errors else None,
            "expires_at": now + _WINDOW_S,
            "request_counts": {"total": count, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self._store.save(batch, owner)
        return batch

    async def _batch(self, request: Request, context: RequestContext) -> ASGIApp:
        batch = await self._find("batch", request, context)
        # After a restart of the gateway this is what brings the keys of its requests back.
        self._runner.ensure(batch, await self._owner(context), context.identity())
        return JSONResponse(batch)

    async def _cancel(self, request: Request, context: RequestContext) -> ASGIApp:
        batch = await self._find("batch", request, context)
        return JSONResponse(await self._runner.cancel(batch, await self._owner(context), context.identity()))

    async def _find(self, kind: str, request: Request, context: RequestContext) -> dict[str, Any]:
        owner = await self._owner(context)
        return await asyncio.to_thread(self._store.find, request.path_params["id"], kind, owner)

    async def _list(self, kind: str, request: Request, context: RequestContext) -> ASGIApp:
        found = await asyncio.to_thread(self._store.all, kind, await self._owner(context))
        text = request.query_params.get("limit", str(_DEFAULT_LIST))
        if not text.isdecimal() or len(text) > _MAX_DIGITS or not 1 <= int(text) <= _MAX_LIST:
            raise RequestError(f"limit must be from 1 to {_MAX_LIST}, got '{text[:20]}'", param="limit")
        if after := request.query_params.get("after"):
            ids = [facts["id"] for facts in found]
            found = found[ids.index(after) + 1 :] if after in ids else []
        page = found[: int(text)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(found) > len(page)})

    async def _owner(self, context: RequestContext) -> str:
        """The caller, after checking the key; "" without a key."""
        await self._resources.check_key(context.identity())
        keys = [pair for pair in context.identity() if pair[0] in KEY_HEADERS]
        return hashlib.sha256(repr(keys).encode()).hexdigest() if keys else ""


async def _limited(stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in stream:
        size += len(part)
        if size > MAX_FILE_BYTES:
            raise too_large(f"more than {MAX_FILE_BYTES} bytes", MAX_FILE_BYTES)
        yield part
