"""The ``openai`` backend: each request is a call of another server, on the event loop."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from weft.backends.openai.replies import ForeignCall, Reply, read_embedding, read_generation
from weft.backends.openai.settings import complete, read_settings
from weft.base.cancellation import cancel_and_wait
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    UnavailableError,
    WeftError,
)
from weft.base.observing.logs import get_logger
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.backends.loading import require, require_installed
from weft.serving.request.request import STREAMED, InferenceRequest, InferenceResponse, Outcome, Response
from weft.serving.request.stream import MAX_WAITING, ResponseStream

if TYPE_CHECKING:
    from weft.backends.openai.server import ForeignServer

_LOG = get_logger("weft.model.openai")


class OpenAiBackend(Backend):
    """Calls a server of OpenAI's protocol: vLLM, SGLang, llama.cpp, a hosted one, or Weft's own gateway.

    Parameters, tensors and errors: docs/engines.md. A language model is decoupled and has the tensors of the backend
    ``llm``. Up to ``max_requests`` are in flight; others wait in the model's queue. A cancelled request, or one
    whose deadline passes, closes its connection at once. After ``max_failures`` failures in a row the instance counts
    as lost, and requests fail with UNAVAILABLE until GET ``/models`` is answered.
    """

    auto_complete = staticmethod(complete)  # type: ignore[assignment]  # mypy takes the base's for a method
    completes_always: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True
    can_collect: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        super().__init__(model, instance)
        self._server: ForeignServer | None = None
        self._settings = read_settings(model)
        self._tasks: set[asyncio.Task[Outcome]] = set()
        self._loss = ""

    @override
    @classmethod
    def num_slots(cls, model: ModelContext) -> int:
        settings = read_settings(model)
        return 0 if settings.api == "embeddings" else settings.max_requests

    @override
    @classmethod
    def is_remote(cls, model: ModelContext) -> bool:
        return True

    @override
    async def open(self) -> None:
        if self._server is None:
            server_class = require("weft.backends.openai.server", "openai-backend").ForeignServer  # imports aiohttp
            self._server = server_class(self._settings, self.model.signature.name)
            self.num_at_once = self._settings.max_requests
        else:
            await self._server.probe()
        self._loss = ""

    def check(self) -> None:
        """Check for the client's package; the settings are read already, and the server may start later."""
        require_installed("aiohttp", "openai-backend")

    @override
    def load(self) -> None:
        raise NotImplementedError  # it is remote

    @override
    def execute(self, batch: Batch) -> list[Outcome]:
        raise NotImplementedError  # it is remote

    @override
    def start(self, batch: Batch, on_end: Callable[[list[Outcome] | None], None]) -> None:
        tasks = [asyncio.ensure_future(self._run(request)) for request in batch.requests]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        if all(request.stream is not None for request in batch.requests):
            streamed: list[Outcome] = [STREAMED] * len(tasks)
            asyncio.get_running_loop().call_soon(on_end, streamed)
        else:
            ended = asyncio.gather(*tasks)
            ended.add_done_callback(lambda done: on_end(list(done.result())))

    @override
    def why_lost(self) -> str:
        return self._loss

    @override
    async def shut(self) -> None:
        self._loss = self._loss or f"instance {self.instance.name} is closed"
        await cancel_and_wait(list(self._tasks))
        if self._server is not None:
            await self._server.close()

    async def _run(self, request: InferenceRequest) -> Outcome:
        """The outcome of a request, which its stream gets too; never raises."""
        task, stream = asyncio.current_task(), request.stream

        def leave() -> None:
            if task is not None:
                task.cancel()

        request.when_cancelled(leave)
        if stream is not None:
            stream.on_over = leave
        outcome: Outcome
        try:
            outcome = InferenceResponse({}) if request.is_cancelled else await self._answer(request, stream)
        except WeftError as error:
            outcome = error.with_message(error.message)  # without the traceback, which holds the request
        except asyncio.CancelledError:
            outcome = self._cancelled(request)
        except Exception as error:
            failure = InternalError("the answer of the other server cannot be made into a response")
            _LOG.error(failure.message, exc_info=error, extra={"error_id": failure.error_id})
            outcome = failure
        request.forget(leave)
        if stream is not None:
            stream.on_over = None
            stream.deliver(outcome, is_final=True)
        self._watch()
        return outcome

    async def _answer(self, request: InferenceRequest, stream: "ResponseStream[Response] | None") -> Outcome:
        server, settings = self._server, self._settings
        if server is None:
            raise UnavailableError(f"instance {self.instance.name} is not open")
        is_embedding = settings.api == "embeddings"
        call = (read_embedding if is_embedding else read_generation)(request, settings)
        reply = Reply(call, f"the server of model '{self.model.signature.name}'")
        request_id, deadline_ns = request.call.request_id, request.context.deadline_ns
        if stream is not None and call.is_streamed:
            return await self._stream(server, call, reply, stream, request)
        said = await server.answer(call.path, call.body, request_id=request_id, deadline_ns=deadline_ns)
        if is_embedding:
            vectors = reply.vectors(said)
            has_rows = self.model.signature.max_batch_size > 0
            return InferenceResponse(vectors if has_rows else {name: array[0] for name, array in vectors.items()})
        reply.add(said)
        return InferenceResponse(reply.take(is_final=True))

    async def _stream(
        self,
        server: "ForeignServer",
        call: ForeignCall,
        reply: Reply,
        stream: "ResponseStream[Response]",
        request: InferenceRequest,
    ) -> Outcome:
        """Send a response for each chunk with text, no faster than they are read; the last one is the outcome."""
        room = asyncio.Semaphore(MAX_WAITING)
        stream.on_taken = room.release
        events = server.events(
            call.path, call.body, request_id=request.call.request_id, deadline_ns=request.context.deadline_ns
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if reply.add(event):
                    await room.acquire()
                    stream.deliver(InferenceResponse(reply.take(is_final=False)), is_final=False)
        return InferenceResponse(reply.take(is_final=True))

    def _cancelled(self, request: InferenceRequest) -> WeftError:
        deadline_ns = request.context.deadline_ns
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            return DeadlineExceededError("the deadline has passed")
        if request.is_cancelled:
            return RequestCancelledError("the caller has left")
        return UnavailableError(self._loss or f"instance {self.instance.name} ended the request")

    def _watch(self) -> None:
        """Count the server as down after too many failures in a row."""
        limit = self._settings.max_failures
        if self._server is not None and not self._loss and limit and self._server.num_failures >= limit:
            self._loss = f"{self._settings.url} has failed {self._server.num_failures} times in a row"
            self.on_lost()
