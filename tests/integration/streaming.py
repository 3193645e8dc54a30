"""A V2 server whose decoupled model tells how far it got, and a tritonclient stream before it."""

import asyncio
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.mesh.serving import serving
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.errors import RemoteError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import bytes_tensor, split_bytes
from weft.router.repository.config import config_of_signature
from weft_protos.model_config_pb2 import ModelConfig

MODELS = ("pre", "llm", "all", "post")
TIMEOUT_S = 20.0
ROOT = Path(__file__).parents[2]


class TokenCore(InferenceCore):
    """``pre`` and ``post`` put their name behind a text; ``llm`` is decoupled and gives ``text.0``, ``text.1``, ...

    ``all`` is decoupled too, and gives one response ``text.0``, which waits for ``limit`` where the request says so; to
    a unary call it gives ``text,all``.

    Request parameters tell ``llm`` what to do: ``count`` responses, each padded to ``num_bytes``; ``fail_after`` and
    ``hang_after`` so many, and ``post`` that it waits for ``limit``.

    Attributes:
        made: By request id: responses that ``llm`` has made.
        num_open: Calls in work, of every model.
        most_posts: Calls of ``post`` in work at once, at most.
        limit: What ``post`` waits for.
        loop: Where it runs.
    """

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.num_open = 0
        self.most_posts = 0
        self.limit = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._num_posts = 0
        self._changed = threading.Condition()

    def set_gate(self, *, is_open: bool) -> None:
        """Calls that are to wait for ``limit`` do so from now on, or go on."""
        self.loop.call_soon_threadsafe(self.limit.set if is_open else self.limit.clear)

    def until(self, claim: Any) -> None:
        """Return when ``claim()`` holds; for the thread of the test."""
        with self._changed:
            assert self._changed.wait_for(claim, TIMEOUT_S), f"open {self.num_open}, made {dict(self.made)}"

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> ModelSignature:
        text, answer = TensorSpec("TEXT", "BYTES", (1,)), TensorSpec("OUT", "BYTES", (1,))
        return ModelSignature(name, "1", "tokens", 0, (text,), (answer,), name in ("llm", "all"), name == "all")

    def config(self, name: str, version: str) -> ModelConfig:
        return config_of_signature(self.signature(name, version))

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", "READY", "") for name in MODELS]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        (said,) = split_bytes(call.inputs["TEXT"].data)
        with self._in_work():
            if call.model_name == "post":
                self._num_posts += 1
                self.most_posts = max(self.most_posts, self._num_posts)
                self._tell()
                try:
                    if call.parameters.get("limit"):
                        await self.limit.wait()
                finally:
                    self._num_posts -= 1
        return self._answer(call, b"%s,%s" % (said, call.model_name.encode()))

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        if call.model_name == "all":
            if call.parameters.get("limit"):
                await self.limit.wait()
            yield self._answer(call, split_bytes(call.inputs["TEXT"].data)[0] + b".0")
            return
        if call.model_name != "llm":
            yield await self.infer(call, context)
            return
        (said,) = split_bytes(call.inputs["TEXT"].data)
        parameters: defaultdict[str, Any] = defaultdict(int, call.parameters)
        with self._in_work():
            for number in range(parameters["count"]):
                if number == call.parameters.get("fail_after"):
                    raise RemoteError("RESOURCE_EXHAUSTED", "out of blocks")
                if number == call.parameters.get("hang_after"):
                    await asyncio.Event().wait()
                self.made[call.request_id] += 1
                result = self._answer(call, (b"%s.%d" % (said, number)).ljust(parameters["num_bytes"]))
                result.is_final = False
                yield result
        yield InferResult("llm", "1", call.request_id, is_null=True)

    @contextmanager
    def _in_work(self) -> Iterator[None]:
        self._tell(num_open=1)
        try:
            yield
        finally:
            self._tell(num_open=-1)

    def _tell(self, *, num_open: int = 0) -> None:
        with self._changed:
            self.num_open += num_open
            self._changed.notify_all()

    def _answer(self, call: InferCall, text: bytes) -> InferResult:
        return InferResult(call.model_name, "1", call.request_id, {}, {"OUT": bytes_tensor([text], (1,))})


class Stream:
    """A tritonclient stream; ``take`` gives what its callback got, in order."""

    def __init__(self, address: str, **options: Any) -> None:
        self.client = triton.InferenceServerClient(address)
        self._got: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        #: The callback, and so the client, waits for it.
        self.is_reading = threading.Event()
        self.is_reading.set()
        self.client.start_stream(callback=self._called, **options)

    def send(self, model: str, text: str, request_id: str, *, asks_for_final: bool = False, **parameters: Any) -> None:
        """A request; parameters are those of the token models."""
        self.client.async_stream_infer(
            model,
            [text_input(text)],
            request_id=request_id,
            enable_empty_final_response=asks_for_final,
            parameters=parameters,
        )

    def take(self) -> tuple[str, str, bool]:
        """The next response: request id, text ("" for none) and final mark; or "error", its message and True."""
        result, error = self._got.get(timeout=TIMEOUT_S)
        if error is not None:
            return "error", str(error), True
        response = result.get_response()
        is_final = response.parameters["triton_final_response"].bool_param
        if not response.outputs:
            return response.id, "", is_final
        return response.id, result.as_numpy(response.outputs[0].name)[0].decode().replace(" ", ""), is_final

    def take_all(self) -> list[tuple[str, str]]:
        """Id and text of each response to one request, which asks for its end: with its last one, or empty after it."""
        got, is_final = [], False
        while not is_final:
            request_id, text, is_final = self.take()
            if text or not is_final:
                got.append((request_id, text))
        return got

    def close(self, *, cancels: bool = False) -> None:
        """The stream has ended; with ``cancels`` its requests are cancelled."""
        self.is_reading.set()
        self.client.stop_stream(cancel_requests=cancels)
        self.client.close()

    def _called(self, result: Any, error: InferenceServerException | None) -> None:
        self._got.put((result, error))
        self.is_reading.wait()


def text_input(text: str) -> triton.InferInput:
    """The input of every token model and graph."""
    tensor = triton.InferInput("TEXT", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


@contextmanager
def mortal_service() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Address and process of a service with the token models that may be killed."""
    with subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


if __name__ == "__main__":
    with serving(TokenCore()) as mortal:
        print(mortal, flush=True)
        signal.pause()
