"""Stores files and batches in a folder, each with its owner, and runs batches in the background."""

import asyncio
import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import NotFoundError, WeftError
from weft.base.observing.logs import get_logger
from weft.gateway.errors import RequestError
from weft.jobs.atomic_files import replace_file
from weft.jobs.dataset import Dataset, Shard
from weft.jobs.window import Window

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_OWNER = "owner"


class Store:
    """Objects of the kinds ``file`` and ``batch``, by id. Blocking: call it on threads.

    ``DIR/file-…/object.json`` and ``content``; ``DIR/batch-…/object.json`` and the files of its job. Creates the folder
    if missing, for this user alone; raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder

    def new_id(self, kind: str) -> str:
        """A random id that cannot be guessed."""
        return f"{kind}-{secrets.token_hex(16)}"

    def path(self, own_id: str) -> Path:
        """Folder of an object."""
        return self._folder / own_id

    def content(self, file_id: str) -> Path:
        """Content of a file."""
        return self.path(file_id) / "content"

    def save(self, facts: Mapping[str, Any], owner: str) -> None:
        """Write an object, new or changed; ``facts`` has its ``id``."""
        folder = self.path(facts["id"])
        folder.mkdir(exist_ok=True, mode=0o700)
        replace_file(folder / "object.json", json.dumps({**facts, _OWNER: owner}).encode())

    def add_file(self, content: Path, filename: str, purpose: str, owner: str) -> dict[str, Any]:
        """Create a file from ``content``, which is moved."""
        own_id = self.new_id("file")
        facts = {
            "id": own_id,
            "object": "file",
            "bytes": content.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self.path(own_id).mkdir(mode=0o700)
        content.replace(self.content(own_id))
        self.save(facts, owner)
        return facts

    def find(self, own_id: str, kind: str, owner: str) -> dict[str, Any]:
        """An object of an owner. Raises NotFoundError if there is none, or it is another's."""
        match = _ID.fullmatch(own_id)
        facts = self._read(own_id) if match and match[1] == kind else None
        if facts is None or facts.pop(_OWNER) != owner:
            where = "/v1/files" if kind == "file" else "/v1/batches"
            raise NotFoundError(f"there is no {kind} '{own_id[:60]}'; GET {where} lists those of your key")
        return facts

    def all(self, kind: str, owner: str | None) -> list[dict[str, Any]]:
        """Objects of an owner, newest first; None: of every owner, each with ``owner``."""
        found = []
        for path in self._folder.glob(f"{kind}-*"):
            facts = self._read(path.name)
            if facts is not None and (owner is None or facts.pop(_OWNER) == owner):
                found.append(facts)
        return sorted(found, key=lambda facts: (facts["created_at"], facts["id"]), reverse=True)

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete a file and its content.

        Raises NotFoundError, or RequestError (409) if an unfinished batch reads it.
        """
        self.find(file_id, "file", owner)
        for batch in self.all("batch", owner):
            if batch["input_file_id"] == file_id and batch["status"] in ("in_progress", "cancelling", "finalizing"):
                raise RequestError(f"'{file_id}' is read by '{batch['id']}'; cancel that first", http_status=409)
        shutil.rmtree(self.path(file_id))

    def _read(self, own_id: str) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = json.loads((self.path(own_id) / "object.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return facts


#: Requests of a batch at most, as with OpenAI.
MAX_REQUESTS = 50_000
_COLUMNS = ("custom_id", "method", "url", "body")
#: Of bodies; answers in batches are whole.
_STREAM_FIELDS = ("stream", "stream_options")
_REQUESTS_PER_PART = 64
_MAX_SHOWN_ERRORS = 20
_MAX_INFLIGHT = 256
_RETRY_S = 0.5
#: The server has too much to do, or is away; the request is tried again.
_BUSY = (429, 502, 503)
_OPEN = ("in_progress", "finalizing", "cancelling")

_log = get_logger("weft.gateway")

Headers = Sequence[tuple[str, str]]


class BackgroundRunner:
    """Runs batches; they survive restarts of the gateway, and no written answer is computed again.

    Owned by the event loop. Keys of batches are kept only in memory: after a restart, a batch whose owner has keys
    resumes once the owner asks for it.

    Args:
        app: Answers a request, like one of a client.
    """

    def __init__(self, store: Store, app: ASGIApp) -> None:
        self._store = store
        self._app = app
        self._window = Window(_MAX_INFLIGHT, time.monotonic_ns, yields=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Batches whose files a thread puts together, which cannot be cancelled.
        self._finalizing: set[str] = set()

    async def resume(self) -> None:
        """Resume the batches of owners without keys."""
        for batch in await asyncio.to_thread(self._store.all, "batch", None):
            if batch.pop("owner") == "":
                self.ensure(batch, "", ())

    def ensure(self, batch: Mapping[str, Any], owner: str, headers: Headers) -> None:
        """Run an unfinished batch unless it is running; ``headers`` are those of its requests."""
        if batch["id"] not in self._tasks and batch["status"] in _OPEN:
            task = asyncio.create_task(self._run(dict(batch), owner, headers))
            self._tasks[batch["id"]] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def cancel(self, batch: Mapping[str, Any], owner: str, headers: Headers) -> dict[str, Any]:
        """Cancel a batch and its requests in flight; answers so far are kept."""
        if batch["status"] not in ("in_progress", "cancelling"):
            return dict(batch)
        await self._stop(batch["id"])
        current = await asyncio.to_thread(self._store.find, batch["id"], "batch", owner)
        if current["status"] in _OPEN:
            current |= {"status": "cancelling", "cancelling_at": int(time.time())}
            await asyncio.to_thread(self._store.save, current, owner)
            self.ensure(current, owner, headers)
        return current

    async def close(self) -> None:
        """Stop; batches resume when the gateway starts again."""
        for own_id in list(self._tasks):
            await self._stop(own_id)

    async def _stop(self, own_id: str) -> None:
        task = self._tasks.get(own_id)
        if task is not None and own_id in self._finalizing:
            await asyncio.wait([task])
        elif task is not None:
            await cancel_and_wait([task])

    async def _run(self, batch: dict[str, Any], owner: str, headers: Headers) -> None:
        try:
            if batch["status"] == "in_progress":
                await self._answer_all(batch, owner, headers)
            self._finalizing.add(batch["id"])
            await asyncio.to_thread(self._finalize, batch, owner)
        except (OSError, WeftError) as error:
            message = error.message if isinstance(error, WeftError) else str(error)
            _log.error("batch '%s' waits for a restart of the gateway: %s", batch["id"], message)
        except Exception:
            _log.exception("batch '%s' waits for a restart of the gateway", batch["id"])
        finally:
            self._finalizing.discard(batch["id"])

    async def _answer_all(self, batch: dict[str, Any], owner: str, headers: Headers) -> None:
        folder = self._store.path(batch["id"])
        counts = {"completed": 0, "failed": 0}
        shards = Dataset(str(self._store.content(batch["input_file_id"])), "jsonl").shards(_REQUESTS_PER_PART, _COLUMNS)
        try:
            async with asyncio.timeout(max(0.0, batch["expires_at"] - time.time())):
                while (shard := await asyncio.to_thread(next, shards, None)) is not None:
                    part = _part(folder, shard.index)
                    if not part.exists():
                        lines = await self._answer_shard(batch["id"], shard, headers)
                        await asyncio.to_thread(replace_file, part, lines)
                    for name, number in (await asyncio.to_thread(_counts, part)).items():
                        counts[name] += number
                    batch["request_counts"] |= counts
                    await asyncio.to_thread(self._store.save, batch, owner)
        except TimeoutError:
            batch |= {"expired_at": int(time.time())}

    async def _answer_shard(self, batch_id: str, shard: Shard, headers: Headers) -> bytes:
        async def answer(row: int) -> dict[str, Any]:
            custom_id, _, url, body = (shard.columns[name][row] for name in _COLUMNS)
            whole = {name: value for name, value in body.items() if name not in _STREAM_FIELDS}
            response = await self._answer(url, json.dumps(whole).encode(), headers)
            own_id = f"batch_req-{batch_id.removeprefix('batch-')}-{shard.first_row + row}"
            return {"id": own_id, "custom_id": custom_id, "response": response, "error": None}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(row)) for row in range(shard.num_rows)]
        lines = "".join(json.dumps(task.result(), ensure_ascii=False) + "\n" for task in tasks)
        return lines.encode("utf-8", "backslashreplace")  # half a surrogate pair is written as it was read

    async def _answer(self, url: str, body: bytes, headers: Headers) -> dict[str, Any]:
        async with self._window.place() as place:
            await place.begin()
            try:
                while (response := await self._call(url, body, headers))["status_code"] in _BUSY:
                    place.refused()
                    await asyncio.sleep(_RETRY_S)
                return response
            finally:
                place.end()

    async def _call(self, url: str, body: bytes, headers: Headers) -> dict[str, Any]:
        sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        parts: list[bytes] = []
        start: Message = {}

        async def receive() -> Message:
            if sent:
                return sent.pop()
            return await asyncio.get_running_loop().create_future()  # whoever sends a batch does not disconnect

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        given = (("content-type", "application/json"), ("content-length", str(len(body))), *headers)
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in given],
        }
        await self._app(scope, receive, send)
        answered = {name.decode(): value.decode() for name, value in start.get("headers", ())}
        return {
            "status_code": start["status"],
            "request_id": answered.get("x-request-id") or answered.get("request-id", ""),
            "body": json.loads(b"".join(parts)),
        }

    def _finalize(self, batch: dict[str, Any], owner: str) -> None:
        folder = self._store.path(batch["id"])
        outputs, errors = folder / "output.jsonl", folder / "errors.jsonl"
        with outputs.open("wb") as output, errors.open("wb") as error:
            for part in _parts(folder):
                for line in part.read_bytes().splitlines(keepends=True):
                    (output if _is_answered(line) else error).write(line)
        now = int(time.time())
        for path, name in ((outputs, "output_file_id"), (errors, "error_file_id")):
            if path.stat().st_size:
                filename = f"{batch['id']}_{path.name}"
                batch[name] = self._store.add_file(path, filename, "batch_output", owner)["id"]
            else:
                path.unlink()
        if batch["status"] == "cancelling":
            batch |= {"status": "cancelled", "cancelled_at": now}
        elif batch.get("expired_at"):
            batch |= {"status": "expired"}
        else:
            batch |= {"status": "completed", "completed_at": now}
        self._store.save(batch, owner)
        for part in _parts(folder):
            part.unlink()


def check_requests(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Count the requests of a file; also return the errors of the first one that ``endpoint`` cannot run."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    count = 0
    for shard in Dataset(str(path), "jsonl").shards(_REQUESTS_PER_PART, _COLUMNS):
        for row in range(shard.num_rows):
            count += 1
            custom_id, method, url, body = (shard.columns[name][row] for name in _COLUMNS)
            fault = shard.faults.get(row) or _fault(custom_id, method, url, body, endpoint, seen)
            if fault and len(errors) < _MAX_SHOWN_ERRORS:
                errors.append({"code": "invalid_request", "line": count, "message": fault, "param": None})
    if not 0 < count <= MAX_REQUESTS:
        message = f"a batch must have 1 to {MAX_REQUESTS} requests, got {count}"
        errors.append({"code": "invalid_request", "line": None, "message": message, "param": None})
    return count, errors


def _fault(custom_id: Any, method: Any, url: Any, body: Any, endpoint: str, seen: set[str]) -> str:
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be a text, got {custom_id!r}"
    if custom_id in seen:
        return f"custom_id {custom_id!r} is there twice"
    seen.add(custom_id)
    if method != "POST":
        return f"method must be POST, got {method!r}"
    if url != endpoint:
        return f"url must be the batch's endpoint, {endpoint}, got {url!r}"
    return "" if isinstance(body, dict) else f"body must be an object, got {type(body).__name__}"


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:06}.jsonl"


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.jsonl"))


def _counts(part: Path) -> dict[str, int]:
    lines = [_is_answered(line) for line in part.read_bytes().splitlines()]
    return {"completed": sum(lines), "failed": len(lines) - sum(lines)}


def _is_answered(line: bytes) -> bool:
    return bool(json.loads(line)["response"]["status_code"] == 200)
