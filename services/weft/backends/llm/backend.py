"""The ``llm`` backend: submits requests to an engine, and passes its tokens to an output thread."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from weft.backends.llm import kv_events, tensors
from weft.backends.llm.adapters import ADAPTERS, InstanceAdapters, adapters_of
from weft.backends.llm.generation import Generation, ResponseSink
from weft.backends.llm.metric_names import EngineExport
from weft.backends.llm.settings import Settings, read_settings
from weft.backends.llm.tensors import RequestReader
from weft.backends.llm.text import TextCodec
from weft.backends.llm.transfers import BlockTransfers
from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.registry import open_weights, read_config
from weft.llm.models.sharding import check_sizes
from weft.llm.request import Delta, EngineRequest
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.backends.loading import require, require_installed
from weft.serving.backends.python import SWITCH_INTERVAL_S
from weft.serving.request.request import STREAMED, InferenceRequest, InferenceResponse, Outcome

_LOG = get_logger("weft.model.llm")
#: Most queued items that are processed before responses are sent.
_MAX_BATCH = 1024

#: Deltas of a step, or a generation whose client has read a response.
_Item = list[tuple[Generation, Delta]] | Generation


class OutputProcessor:
    """Runs every ``Generation`` of one instance on a dedicated thread."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[_Item | None] = SimpleQueue()
        self._step_deltas: list[tuple[Generation, Delta]] = []  # used only by the engine's thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, generation: Generation, delta: Delta) -> None:
        """Collect a delta, on the engine's thread, until ``publish`` passes on all deltas of a step at once."""
        if delta.error is None:
            self._step_deltas.append((generation, delta))
        else:  # errors may come outside of a step and from other threads
            self._inbox.put([(generation, delta)])

    def publish(self) -> None:
        """Queue the collected deltas for conversion; called on the engine's thread, never blocks."""
        if self._step_deltas:
            self._inbox.put(self._step_deltas)
            self._step_deltas = []

    def on_response_taken(self, generation: Generation) -> None:
        """Record that a client has read a response; any thread, never blocks."""
        self._inbox.put(generation)

    def close(self) -> None:
        """Process everything queued so far, and end the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            updated: dict[Generation, None] = {}  # in the order of their first update
            is_open = False
            for item in self._items():
                if item is None:
                    break
                if isinstance(item, Generation):
                    item.on_response_taken()
                    updated[item] = None
                    continue
                for generation, delta in item:
                    self._run_isolated(generation, partial(generation.add, delta))
                    updated[generation] = None
            else:
                is_open = True
            for generation in updated:
                self._run_isolated(generation, generation.flush)

    def _items(self) -> Iterator["_Item | None"]:
        yield self._inbox.get()
        for _ in range(_MAX_BATCH):
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _run_isolated(self, generation: Generation, work: Callable[[], None]) -> None:
        """Run ``work``; a defect fails its own request only."""
        try:
            work()
        except Exception:
            error = InternalError("the answer of the model cannot be made into a response")
            _LOG.exception(error.message, extra={"error_id": error.error_id})
            generation.fail(error)


#: One in this many sequences may wait in the engine beyond those that run, so that a free slot is taken in the next
#: step.
_RESERVE_SHARE = 8
#: Grace period in seconds for requests in an engine that is closed.
_CLOSE_GRACE_S = 1.0


class LlmBackend(Backend):
    """Generates text with the model of a Hugging Face folder, for many requests concurrently (continuous batching).

    Folder, parameters, tensors and request parameters: docs/language-models.md. The model is decoupled: with ``stream``
    true there is a response per token, or per several if the client reads slower; otherwise, and for a unary call,
    there is one response.

    Requests wait in the model's queue, under the priorities, policies and ageing of ``dynamic_batching``, and enter the
    engine while it has slots; one of better priority enters at once, and the engine preempts a worse one. A request
    that is cancelled, or whose deadline passes, leaves the engine within a step, even while running. Several instances
    are separate engines, each with its own weights, and share the requests.
    """

    auto_complete = staticmethod(tensors.complete)  # type: ignore[assignment]  # mypy takes the base's for a method
    completes_always: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True
    can_collect: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        super().__init__(model, instance)
        self._engine: Any = None
        self._output: OutputProcessor | None = None
        self._loss = ""
        self._num_losses = 0
        self._group: Any = None  # ``GroupRunner``, whose module imports torch
        self._adapters: InstanceAdapters | None = None
        self._transfers: BlockTransfers | None = None
        self._events: kv_events.KvEventPublisher | None = None

    @classmethod
    def num_slots(cls, model: ModelContext) -> int:
        """Sequences that the engine runs concurrently, and a few more that wait in it for a slot."""
        max_num_seqs = read_settings(model).engine.max_num_seqs
        return max_num_seqs + max(1, max_num_seqs // _RESERVE_SHARE)

    def check(self) -> None:
        """Check parameters, tokenizer, and the headers of the weights, these but for drafts and adapters."""
        settings = read_settings(self.model, self.instance)
        defaults = self._read_folder(settings)
        directory = self.model.directory
        config = read_config(directory)
        check_sizes(config, settings.engine.parallel_sizes)
        engine = settings.engine.resolved(config)
        RequestReader(self._codec, engine.max_num_seqs, defaults, engine.max_model_len)
        require_installed("torch", "torch")
        for package in kv_events.PACKAGES if settings.kv_events is not None else ():
            require_installed(package, kv_events.EXTRA)
        if isinstance(config, ForeignConfig):
            require_installed("transformers", "llm")
        elif settings.has_weights:
            with open_weights(directory, config, has_values=False):
                pass

    def _read_folder(self, settings: Settings) -> dict[str, Any]:
        """Read the tokenizer; returns the defaults of requests."""
        self._codec = TextCodec.from_folder(self.model.directory, settings.max_text_bytes)
        return tensors.generation_defaults(self.model.directory) if settings.has_own_defaults else {}

    def load(self) -> None:
        """Load weights and tokenizer, start engine and output thread; called again after the engine has died."""
        self.close()
        settings = read_settings(self.model, self.instance)
        load_engine = require("weft.backends.llm.loading", "torch").load_engine  # imports torch
        # Shortens the engine's waits for the GIL.
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        defaults = self._read_folder(settings)
        self._output = output = OutputProcessor(f"{self.instance.name}-out")
        self._engine = load_engine(
            self.model.directory,
            settings,
            after_deltas=output.publish,
            on_lost=self._lose,
            codec=self._codec,
            on_group=partial(setattr, self, "_group"),
        )
        self._transfers = BlockTransfers(self._engine, self.model, settings)
        self._reader = RequestReader(self._codec, settings.engine.max_num_seqs, defaults, self._engine.max_len)
        if self.model.exports is not None:
            export = EngineExport(
                self._engine,
                self.model.signature,
                self.instance.name,
                settings.metric_names,
                self._group,
                self._num_losses,
                settings.role,
            )
            self.model.exports.attach(self.instance.token, export.read)
        if self._engine.lora is not None:
            self._adapters = self._adapters or adapters_of(self.model, settings.engine.lora_root)
            self._adapters.add(self._engine.lora)
        if settings.kv_events is not None:
            pool = self._engine.pool
            self._events = pool.observer = kv_events.KvEventPublisher(
                settings.kv_events, pool.block_size, pool.num_blocks
            )
        self._engine.start()
        self._loss = ""

    def execute(self, batch: Batch) -> list[Outcome]:
        """Submit each request to the engine; an invalid request fails alone."""
        return [self._execute_one(request) for request in batch.requests]

    def why_lost(self) -> str:
        """Why the engine died; "" while it runs."""
        return self._loss

    def abort(self) -> None:
        """End the ranks, if there are some, so that a load that waits for them fails."""
        if self._group is not None:
            threading.Thread(target=self._group.close, daemon=True).start()

    def close(self) -> None:
        """Stop engine and output thread; unfinished requests fail."""
        if self.model.exports is not None:
            self.model.exports.detach(self.instance.token)
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._engine is not None:
            if self._adapters is not None:
                self._adapters.remove(self._engine.lora)
            self._engine.stop(_CLOSE_GRACE_S)
            self._engine = self._group = None
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _execute_one(self, request: InferenceRequest) -> Outcome:
        sink: ResponseSink = _ResponseWaiter() if request.stream is None else request.stream
        try:
            if any(output.name == ADAPTERS for output in request.call.outputs):
                self._answer_adapters(request, sink)
            elif (outputs := self._reader.prompt_outputs(request)) is not None:
                sink.deliver(InferenceResponse(outputs), is_final=True)
            else:
                self._submit(request, sink)
        except WeftError as error:
            return error
        return sink.wait() if isinstance(sink, _ResponseWaiter) else STREAMED

    def _answer_adapters(self, request: InferenceRequest, sink: ResponseSink) -> None:
        adapters = self._adapters
        if len(request.call.outputs) > 1 or adapters is None:
            raise InvalidArgumentError(
                f"output '{ADAPTERS}' must be asked for alone, of a model with 'lora_adapters' or 'max_loras'"
            )
        # Files are read, so on a thread of its own: other requests do not wait.
        threading.Thread(target=lambda: sink.deliver(adapters.answer(request), is_final=True), daemon=True).start()

    def _submit(self, request: InferenceRequest, sink: ResponseSink) -> None:
        engine, output, transfers = self._engine, self._output, self._transfers
        if engine is None or output is None or transfers is None:
            raise UnavailableError(f"instance {self.instance.name} is closed")
        generation_request = self._reader.read(request)
        context = request.context
        engine_request = EngineRequest(
            prompt_ids=generation_request.prompt_ids,
            params=generation_request.params,
            sink=lambda delta: output.add(generation, delta),
            level=request.priority,
            arrival_ns=request.enqueue_ns,
            deadline_ns=context.deadline_ns,
            salt=generation_request.salt,
            bad_words=generation_request.bad_words,
            resume_token_ids=generation_request.resume_token_ids,
            id=request.call.request_id,
        )
        cancel = partial(engine.cancel, engine_request)
        source = transfers.prepare(engine_request, generation_request, request.call.parameters)
        generation = Generation(
            request,
            generation_request,
            self._codec,
            sink,
            finish=partial(engine.finish, engine_request),
            cancel=cancel,
            on_done=partial(request.forget, cancel),
            source=source,
        )
        if request.stream is not None:
            request.stream.on_taken = partial(output.on_response_taken, generation)
        request.when_cancelled(cancel)
        try:
            transfers.submit(engine_request, request.call.parameters, generation.events)
        except WeftError:
            request.forget(cancel)
            raise

    def _lose(self, error: WeftError) -> None:
        self._num_losses += 1
        self._loss = f"the engine of instance {self.instance.name} has ended: {error.message}"
        self.on_lost()


class _ResponseWaiter:
    """Waits for the single response of a request without a stream, such as a warm-up."""

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self._response: InferenceResponse | WeftError | None = None

    def deliver(self, response: InferenceResponse | WeftError | None, *, is_final: bool) -> None:
        """See ``ResponseSink``."""
        self._response = response
        if is_final:
            self._has_come.set()

    def wait(self) -> Outcome:
        self._has_come.wait()
        return self._response or InternalError("the model sent no response")
