"""Batches in the background, over an application that answers as it is told."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from weft.gateway.batches import runner as module
from weft.gateway.batches.runner import BackgroundRunner, Store, check_requests

URL = "/v1/completions"
WAIT_S = 30.0


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the prompt; 400 where it is empty."""
    prompt = json.loads((await receive())["body"])["prompt"]
    await send({"type": "http.response.start", "status": 200 if prompt else 400, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"text": prompt}).encode()})


def _batch(store: Store, prompts: Sequence[str], tmp_path: Path) -> dict[str, Any]:
    lines = [
        {"custom_id": f"{number}{prompt}", "method": "POST", "url": URL, "body": {"prompt": prompt}}
        for number, prompt in enumerate(prompts)
    ]
    path = tmp_path / "input"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_requests(path, URL) == (len(prompts), [])
    file = store.add_file(path, "input", "batch", "")
    batch = {
        "id": store.new_id("batch"), "input_file_id": file["id"], "status": "in_progress", "endpoint": URL,
        "created_at": 0, "expires_at": time.time() + 1000, "output_file_id": None, "error_file_id": None,
        "request_counts": {"total": len(prompts), "completed": 0, "failed": 0},
    }  # fmt: skip
    store.save(batch, "")
    return batch


async def _end(store: Store, batch: Mapping[str, Any]) -> dict[str, Any]:
    deadline_s = time.monotonic() + WAIT_S
    while (found := store.find(batch["id"], "batch", ""))["status"] in ("in_progress", "cancelling"):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    return found


async def test_every_request_is_counted_and_written_once(tmp_path: Path) -> None:
    """Over several parts; half a surrogate pair, which UTF-8 has not, comes back as it was sent."""
    store = Store(tmp_path / "store")
    runner = BackgroundRunner(store, _echo)
    prompts = [*(f"p{number}" for number in range(150)), "", "\ud800", ""]
    batch = _batch(store, prompts, tmp_path)
    runner.ensure(batch, "", ())
    end = await _end(store, batch)
    assert (end["status"], end["request_counts"]) == ("completed", {"total": 153, "completed": 151, "failed": 2})
    output = [json.loads(line) for line in store.content(end["output_file_id"]).read_bytes().splitlines()]
    assert [line["response"]["body"]["text"] for line in output] == [prompt for prompt in prompts if prompt]
    assert output[-1]["custom_id"] == "151\ud800"
    await runner.close()


async def test_a_batch_that_is_cancelled_while_it_is_finished_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What puts its files together cannot be interrupted, and is not done twice."""
    store = Store(tmp_path / "store")
    runner = BackgroundRunner(store, _echo)
    batch = _batch(store, ["a", "b"], tmp_path)
    is_there, may_go_on = threading.Event(), threading.Event()
    add_file = store.add_file

    def slow(*arguments: Any) -> dict[str, Any]:
        is_there.set()
        assert may_go_on.wait(WAIT_S)
        return add_file(*arguments)

    monkeypatch.setattr(store, "add_file", slow)
    runner.ensure(batch, "", ())
    assert await asyncio.to_thread(is_there.wait, WAIT_S)
    cancelling = asyncio.create_task(runner.cancel(batch, "", ()))
    await asyncio.sleep(0)
    may_go_on.set()
    end = await cancelling
    assert (end["status"], end["request_counts"]["completed"]) == ("completed", 2)
    assert len(store.content(end["output_file_id"]).read_bytes().splitlines()) == 2
    assert len(store.all("file", "")) == 2


async def test_a_defect_is_logged_and_leaves_the_batch_to_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application that raises ends no other batch, and its own goes on when it is asked for."""
    store = Store(tmp_path / "store")
    told = threading.Event()

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module._log, "exception", lambda *_: told.set())
    batch = _batch(store, ["a"], tmp_path)
    BackgroundRunner(store, broken).ensure(batch, "", ())
    assert await asyncio.to_thread(told.wait, WAIT_S)
    assert store.find(batch["id"], "batch", "")["status"] == "in_progress"
    BackgroundRunner(store, _echo).ensure(batch, "", ())
    assert (await _end(store, batch))["status"] == "completed"
