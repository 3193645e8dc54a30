"""The backend ``llm``: hands requests to an engine that works on many at once, and its tokens to an output thread."""

import sys
import threading
from functools import partial
from typing import Any, ClassVar

from weft_common.errors import InternalError, UnavailableError, WeftError
from weft_model.backends.llm import tensors
from weft_model.backends.llm.generation import Generation, ResponseSink
from weft_model.backends.llm.generation_request import RequestReader
from weft_model.backends.llm.metrics import EngineExport
from weft_model.backends.llm.output_processor import OutputProcessor
from weft_model.backends.llm.settings import read_settings
from weft_model.backends.llm.text import TextCodec
from weft_model.llm.request import EngineRequest
from weft_serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft_serving.backends.loading import require
from weft_serving.backends.python.backend import SWITCH_INTERVAL_S
from weft_serving.request.request import STREAMED, InferenceRequest, InferenceResponse, Outcome

#: Beyond the sequences that run, one in so many may be with the engine already, so that a seat is taken in the next
#: step after it is free.
_RESERVE_SHARE = 8
#: How long an engine that is closed may still work on what nobody waits for any longer, in seconds.
_CLOSE_GRACE_S = 1.0


class LlmBackend(Backend):
    """Continues texts by a model of a Hugging Face folder, many at a time, token by token.

    The version folder has ``config.json`` and ``*.safetensors`` of a Llama, Mistral or Qwen model, and
    ``tokenizer.json``; without that, prompts and answers are token ids alone. Inputs and outputs are those of Triton's
    vLLM backend, and ``input_ids`` and ``output_ids`` beside them (``tensors``); the configuration need not declare
    them. The model is decoupled: with ``stream`` true a response comes with each token, or with several if the client
    reads slower; else, and for a unary call, one response comes with everything.

    Requests wait in the model's queue, under the priorities, policies and ageing of ``dynamic_batching``, and enter the
    engine while that has seats; one that is strictly better enters at once, and the engine puts a worse one aside. A
    request that is cancelled, or whose deadline passes, is out of the engine within a step, also while it runs. Several
    instances are engines of their own, each with its weights, and share the requests.

    Parameters (all optional): those of ``EngineConfig``, but for ``device`` and ``aging_ns``, and
        max_text_bytes: A longer ``text_input`` is refused, in bytes of UTF-8. Default 1048576.
        load_format: ``safetensors``, or ``dummy``: random weights, for measurements. Default safetensors.

    Request parameters: ``priority`` and ``timeout``; ``cache_salt``: requests share cached prefixes only where it is
    equal; ``add_special_tokens``: false for a ``text_input`` that has them already; and, without the input
    ``sampling_parameters``, sampling parameters by name.
    """

    auto_complete = staticmethod(tensors.complete)  # type: ignore[assignment]  # mypy takes the base's for a method
    completes_always: ClassVar[bool] = True
    can_stream: ClassVar[bool] = True
    can_collect: ClassVar[bool] = True

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        super().__init__(model, instance)
        self._engine: Any = None
        self._outlet: OutputProcessor | None = None
        self._loss = ""

    @classmethod
    def num_slots(cls, model: ModelContext) -> int:
        """What the engine runs at once, and a few that wait there for the next seat."""
        max_num_seqs = read_settings(model).engine.max_num_seqs
        return max_num_seqs + max(1, max_num_seqs // _RESERVE_SHARE)

    def load(self) -> None:
        """Load weights and tokenizer, start engine and output thread; the second time, because the engine was lost."""
        self.close()
        settings = read_settings(self.model, self.instance)
        load_engine = require("weft_model.backends.llm.loading", "model").load_engine  # imports torch
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))  # the engine waits for no other thread
        codec = TextCodec.of_folder(self.model.directory, settings.max_text_bytes)
        self._codec = codec
        self._reader = RequestReader(codec, settings.engine.max_num_seqs)
        self._outlet = outlet = OutputProcessor(f"{self.instance.name}-out")
        self._engine = load_engine(self.model.directory, settings, after_deltas=outlet.publish, on_lost=self._lose)
        if self.model.exports is not None:
            export = EngineExport(self._engine, self.model.signature, self.instance.name)
            self.model.exports.attach(self.instance.token, export.read)
        self._engine.start()
        self._loss = ""

    def execute(self, batch: Batch) -> list[Outcome]:
        """Hand each request to the engine; what is wrong with one is its own answer."""
        return [self._entered(request) for request in batch.requests]

    def why_lost(self) -> str:
        """How the engine ended; "" while it runs."""
        return self._loss

    def close(self) -> None:
        """Engine and output thread have ended; what the engine still worked on has been given up."""
        if self.model.exports is not None:
            self.model.exports.detach(self.instance.token)
        if self._engine is not None:
            self._engine.stop(_CLOSE_GRACE_S)
            self._engine = None
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def _entered(self, request: InferenceRequest) -> Outcome:
        sink: ResponseSink | None = request.stream
        answer = None if sink is not None else _Answer()
        try:
            self._submit(request, sink or answer)
        except WeftError as error:
            return error
        return STREAMED if answer is None else answer.wait()

    def _submit(self, request: InferenceRequest, sink: ResponseSink | None) -> None:
        """The engine has the request. Raises a WeftError for one that it cannot take."""
        engine, outlet = self._engine, self._outlet
        if engine is None or outlet is None or sink is None:
            raise UnavailableError(f"instance {self.instance.name} is closed")
        asked = self._reader.read(request)
        context = request.context
        engine_request = EngineRequest(
            prompt_ids=asked.prompt_ids,
            params=asked.params,
            sink=lambda delta: outlet.came(generation, delta),
            level=request.priority,
            arrival_ns=request.enqueue_ns,
            deadline_ns=context.deadline_ns,
            salt=asked.salt,
            id=request.call.request_id,
        )
        withdraw = partial(engine.cancel, engine_request)
        generation = Generation(
            request,
            asked,
            self._codec,
            sink,
            finish=partial(engine.finish, engine_request),
            withdraw=withdraw,
            on_over=partial(request.forget, withdraw),
        )
        if request.stream is not None:
            request.stream.on_taken = partial(outlet.taken, generation)
        request.when_cancelled(withdraw)
        try:
            engine.submit(engine_request)
        except WeftError:
            request.forget(withdraw)
            raise

    def _lose(self, error: WeftError) -> None:
        """The engine has ended by a defect; on its thread."""
        self._loss = f"the engine of instance {self.instance.name} has ended: {error.message}"
        self.on_lost()


class _Answer:
    """Waits for the one response to a request without a stream, such as a warm-up."""

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self._response: InferenceResponse | WeftError | None = None

    def deliver(self, response: InferenceResponse | WeftError | None, *, is_final: bool) -> None:
        """See ``ResponseSink``."""
        self._response = response
        if is_final:
            self._has_come.set()

    def wait(self) -> Outcome:
        """The last response."""
        self._has_come.wait()
        return self._response or InternalError("the model sent no response")
