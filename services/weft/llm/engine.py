"""The engine: a thread that runs steps while there are requests, and its thread-safe interface."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from weft.base.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.llm.config import EngineConfig, TransformerConfig, kv_window
from weft.llm.engine_core import EngineCore, Runner
from weft.llm.grammar import GrammarCompiler
from weft.llm.kv_transfer import KvTransfers
from weft.llm.metrics import EngineMetrics
from weft.llm.models.lora import LoraBank
from weft.llm.request import UNLIMITED_TOKENS, EngineRequest
from weft.llm.runner import RunnerLostError
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.sequence import Sequence
from weft.llm.speculation.speculator import Speculator


class RequestLimits:
    """Rejects requests that an engine could never serve, or that would index beyond a table of the model."""

    def __init__(self, config: EngineConfig, model_config: TransformerConfig, num_blocks: int) -> None:
        self._vocab_size = model_config.vocab_size
        self._eos_token_ids = model_config.eos_token_ids
        self._max_model_len = config.max_model_len
        self._speculation = config.speculation
        self._num_cached_tokens = kv_window(config, model_config).max_len(config.max_model_len, num_blocks - 1)

    def check(self, request: EngineRequest) -> None:
        """Validate the request; InvalidArgumentError says what is wrong, what is allowed and what to do. Any thread."""
        prompt, params, own = request.prompt_ids, request.params, self._speculation
        if not isinstance(prompt, np.ndarray) or prompt.dtype != np.int32 or prompt.ndim != 1:
            shape = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else type(prompt).__name__
            raise InvalidArgumentError(f"prompt must be a 1-D array of int32 token ids, got {shape}")
        if not len(prompt):
            raise InvalidArgumentError("prompt is empty; give at least one token, such as the one that begins a text")
        self._check_token_ids("prompt", prompt)
        num_new = min(params.max_tokens, 1)
        with_new = "with at least one new token " * num_new
        if len(prompt) + num_new > self._max_model_len:
            raise InvalidArgumentError(
                f"prompt has {len(prompt)} tokens, but {with_new}a text may have "
                f"{self._max_model_len} (max_model_len); shorten the prompt"
            )
        if len(prompt) + num_new > self._num_cached_tokens:
            raise InvalidArgumentError(
                f"prompt has {len(prompt)} tokens, but {with_new}the KV cache holds "
                f"{self._num_cached_tokens}; shorten the prompt, or raise kv_cache_bytes of the model"
            )
        most = self._max_model_len - len(prompt)
        if most < params.max_tokens != UNLIMITED_TOKENS:
            raise InvalidArgumentError(
                f"max_tokens must be at most {most}, which is max_model_len = {self._max_model_len} less the "
                f"{len(prompt)} tokens of the prompt, got {params.max_tokens}; lower it"
            )
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token for token, _ in params.logit_bias])
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids)
        self._check_token_ids("bad_words", [token for word in request.bad_words for token in word])
        if request.resume_token_ids:
            self._check_resumed(request)
        for name, num_top in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if num_top is not None and num_top > self._vocab_size:
                raise InvalidArgumentError(
                    f"{name} must be at most {self._vocab_size}, the model's number of tokens, got {num_top}"
                )
        num_stops = max(len({*params.stop_token_ids, *self._eos_token_ids}), 1)
        if params.use_beam_search and params.n * (1 + num_stops) > self._vocab_size:
            raise InvalidArgumentError(
                f"a beam search of width {params.n} with {num_stops} tokens that end a text compares more tokens than "
                f"the {self._vocab_size} of the model; search with fewer"
            )
        if params.speculation not in (None, "none", own):
            got = f"got {params.speculation!r:.80}"
            raise InvalidArgumentError(
                f"speculation must be 'none', {got}; this model has no other; set the parameter 'speculation' of the "
                f"model to have one"
                if own == "none"
                else f"speculation must be 'none' or '{own}', which this model has, {got}"
            )

    def _check_resumed(self, request: EngineRequest) -> None:
        """Validate the tokens that a request has already; its prompt and parameters are valid."""
        token_ids, params, num_prompt = request.resume_token_ids, request.params, len(request.prompt_ids)
        if params.n > 1 or params.use_beam_search:
            raise InvalidArgumentError(
                "resume_token_ids continues one choice, so n and best_of must be 1 and use_beam_search false; send the "
                "request anew without it"
            )
        self._check_token_ids("resume_token_ids", token_ids)
        most = min(params.max_tokens, self._max_model_len - num_prompt, self._num_cached_tokens - num_prompt) - 1
        if len(token_ids) > most:
            raise InvalidArgumentError(
                f"resume_token_ids has {len(token_ids)} tokens, at most {max(most, 0)} leave room for another within "
                "max_tokens, max_model_len and the KV cache; the output is complete, or the model too small for it"
            )
        stop_ids = {*params.stop_token_ids, *(() if params.ignores_eos else self._eos_token_ids)}
        for index, token in enumerate(token_ids[params.min_tokens :], params.min_tokens):
            if token in stop_ids:
                raise InvalidArgumentError(
                    f"resume_token_ids has the stop token {token} at index {index}: the output is complete; do not "
                    "resume it"
                )

    def _check_token_ids(self, name: str, token_ids: npt.ArrayLike) -> None:
        ids = np.asarray(token_ids, np.int64)
        is_wrong = (ids < 0) | (ids >= self._vocab_size)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise InvalidArgumentError(
                f"{name}: token ids of this model are 0 to {self._vocab_size - 1}, got {ids[index]} at index {index}; "
                f"use the model's own tokenizer"
            )


_LOG = get_logger("weft.llm")

#: Idle time before the thread checks its invariants; back-to-back requests do not pay for the check.
_IDLE_S = 0.1
#: Time between two looks at deadlines of leases, and of requests that wait for a grammar, if nothing runs.
_COMPILING_S = 0.02
#: Time that ``stop`` waits for the current step beyond the grace period.
_STEP_GRACE_S = 5.0

ResultT = TypeVar("ResultT")
#: A handler and its request, or the future of ``transfer``; None only wakes the thread.
_Message = tuple[Callable[[Any], None], EngineRequest | Future[Any]] | None


class Engine:
    """Runs a model for many requests concurrently.

    Only the engine's thread accesses the state. Other threads put messages into a queue, which the thread drains before
    every step and blocks on while it has no requests.

    Args:
        runner: Runs steps; owned by the engine.
        config: Resolved for the model.
        model_config: End-of-text tokens and vocabulary size.
        metrics: Records latencies and rates; created if absent.
        after_deltas: Called on the engine's thread after every step and after messages that may have produced deltas,
            so that sinks can collect deltas and wake another thread once.
        on_lost: Called on the engine's thread if a defect kills it, with the error that its requests received.
        speculator: Gives drafts to sequences; None: no speculation. Other threads may only read its counts.
        grammars: Compiles the grammars of structured output, owned by the engine; None: there is no tokenizer.
        lora: Adapters of the model; None: it has none.
        block_key, block_fields: Of its ``BlockHasher``; engines with the same ones have the same hashes. Without a key
            it draws one.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        model_config: TransformerConfig,
        metrics: EngineMetrics | None = None,
        after_deltas: Callable[[], None] = lambda: None,
        on_lost: Callable[[WeftError], None] = lambda error: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        speculator: Speculator | None = None,
        grammars: GrammarCompiler | None = None,
        lora: LoraBank | None = None,
        block_key: bytes = b"",
        block_fields: Mapping[str, str] | None = None,
    ) -> None:
        self.lora = lora
        self._grammars = grammars or GrammarCompiler(None, (), timeout_s=1.0)
        self.speculator = speculator
        self.metrics = metrics or EngineMetrics(config, model_config)
        self._runner = runner
        self._max_queued = config.max_queued
        self._after_deltas = after_deltas
        self._on_lost = on_lost
        self._clock_ns = clock_ns
        self._limits = RequestLimits(config, model_config, runner.num_blocks)
        core = partial(EngineCore, block_key=block_key, block_fields=block_fields)
        self._core = core(runner, config, model_config, self.metrics, clock_ns, speculator, lora)
        # Putting into it is reentrant, so that a sink and even a finalizer may cancel.
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._stop_ns: int | None = None
        self._loss: WeftError | None = None  # of the runner
        self._end_error: WeftError | None = None  # error for requests after the thread has ended

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot; a request that is not read yet, or waits for its grammar, is one. Any thread."""
        return self._core.scheduler.num_waiting + self._core.num_compiling + self._inbox.qsize()

    @property
    def num_running(self) -> int:
        """Sequences with a slot. Any thread."""
        return self._core.scheduler.num_running

    @property
    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Names of the adapters of sequences with a slot, and of those without one. Any thread."""
        return self._core.scheduler.adapters_in_use

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far. Any thread."""
        return self._core.scheduler.num_preemptions

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self._core.scheduler.max_len

    @property
    def transfers(self) -> KvTransfers:
        """Leases and copies of blocks; other threads may only read its counts."""
        return self._core.transfers

    @property
    def pool(self) -> BlockPool:
        """Blocks of the KV cache; other threads may only read its counts."""
        return self._core.pool

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """Reject new requests, let the others finish for ``grace_s``, and end the thread.

        The rest fail with ``UnavailableError``. Returns whether the thread has ended; False if a step hangs.
        """
        self._stop_ns = self._clock_ns() + round(grace_s * 1e9)
        self._inbox.put(None)
        if self._thread.ident is None:
            self._terminate(UnavailableError("the engine was stopped before it was started"))
        else:
            self._thread.join(grace_s + _STEP_GRACE_S)
        return not self._thread.is_alive()

    def sequences(self, request: EngineRequest) -> list[Sequence]:
        """See ``EngineCore.sequences``."""
        return self._core.sequences(request)

    def submit(self, request: EngineRequest) -> None:
        """Enqueue the request; its sink receives deltas until one has ``is_last`` set. Raises as ``prepare``."""
        self.prepare(request)
        self.enqueue(request)

    def prepare(self, request: EngineRequest) -> None:
        """The first half of ``submit``: afterwards its ``block_hashes`` are known, and it must be enqueued. Any thread.

        Raises:
            InvalidArgumentError: The engine could never serve it.
            NotFoundError: Its adapter is not loaded.
            UnsupportedError: It asks for structured output, which is not available.
            ResourceExhaustedError: ``max_queued`` sequences are waiting, or too many grammars.
            UnavailableError: The engine is stopping, has stopped or has died.
        """
        if self._stop_ns is not None or self._end_error is not None:
            raise UnavailableError("the engine takes no requests: it is stopping, has stopped or was lost").refused()
        self._limits.check(request)
        if 0 < self._max_queued <= self.num_waiting:
            raise ResourceExhaustedError(
                f"Exceeds maximum queue size: {self._max_queued} sequences wait already; try again later"
            )
        if request.params.lora_name:
            self._core.acquire(request)
        spec = request.params.structured_outputs
        if spec is not None:
            resume = partial(self._inbox.put, (self._core.resume, request))
            try:
                request.grammar = self._grammars.submit(spec, request.params.n, resume, request.resume_token_ids)
            except WeftError:
                self._core.release(request)
                raise
        request.arrival_ns = request.arrival_ns or self._clock_ns()
        self._core.prepare(request)

    def enqueue(self, request: EngineRequest) -> None:
        """The second half of ``submit``. Any thread."""
        self._inbox.put((self._core.admit, request))
        if self._end_error is not None:  # the thread may have ended without reading this request
            self._reject_unread(self._end_error)

    def cancel(self, request: EngineRequest) -> None:
        """Cancel the request and free its resources before the next step.

        Its sink receives no more deltas, except one that is being delivered at this moment. Any thread, also from a
        sink. No effect on a request that has ended.
        """
        request.is_cancelled = True
        self._inbox.put((self._core.abort, request))

    def finish(self, request: EngineRequest, choice: int) -> None:
        """Finish one choice early, for example at a stop string, and free it before the next step.

        Other choices continue; when all have finished, the request ends with outcome "stop". Deltas that are already on
        their way are still delivered; if this call ends the request, none of them has ``is_last`` set. Any thread; no
        effect on a choice that has finished.
        """
        self._inbox.put((partial(self._core.finish, choice=choice), request))

    def lose(self, error: WeftError) -> None:
        """End the thread, and fail every request with ``error``: the runner is lost. Any thread."""
        self._loss = error
        self._inbox.put(None)

    def transfer(self, work: Callable[[KvTransfers], ResultT]) -> "Future[ResultT]":
        """Run ``work`` between two steps; the future fails with a WeftError if the engine stops first. Any thread."""
        future: Future[ResultT] = Future()

        def run(_: EngineRequest) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._core.transfers))
                except Exception as error:  # for whoever awaits it
                    future.set_exception(error)

        self._inbox.put((run, future))
        if self._end_error is not None:
            self._reject_unread(self._end_error)
        return future

    def _run(self) -> None:
        try:
            self._runner.bind_thread()
            self._serve()
        except RunnerLostError as loss:
            _LOG.error("%s", loss.message)
            self._terminate(loss)
            self._on_lost(loss)
        except BaseException as exception:  # the thread ends, so every pending request must fail
            error = InternalError("the engine was lost")
            _LOG.exception("the engine was lost", extra={"error_id": error.error_id}, exc_info=exception)
            self._terminate(error)
            self._on_lost(error)
        else:
            self._terminate(UnavailableError("the engine stopped before the request was finished"))

    def _serve(self) -> None:
        core = self._core
        while True:
            self._read_inbox()
            if self._loss is not None:
                core.drain()
                raise self._loss
            now_ns = self._clock_ns()
            core.expire(now_ns)
            has_requests = core.has_requests or core.num_compiling
            if self._stop_ns is not None and (not has_requests or now_ns >= self._stop_ns):
                core.drain()
                return
            if core.has_requests:
                core.step()
            self._after_deltas()

    def _read_inbox(self) -> None:
        inbox = self._inbox
        has_timers = self._core.num_compiling > 0 or self._core.transfers.num_open > 0
        if not self._core.has_requests and (self._stop_ns is None or has_timers):  # nothing else to do: wait
            try:
                message = inbox.get(timeout=_COMPILING_S if has_timers else _IDLE_S)
            except Empty:
                if has_timers:
                    return
                self._core.scheduler.check()
                message = inbox.get()
            self._handle(message)
        for _ in range(inbox.qsize()):  # later messages wait for a step, so that a flood cannot stall decoding
            self._handle(inbox.get())

    def _handle(self, message: _Message) -> None:
        if message is not None:
            handle, request = message
            handle(request)

    def _terminate(self, error: WeftError) -> None:
        self._end_error = error
        self._core.fail_all(error)
        self._reject_unread(error)
        self._grammars.close()
        self._after_deltas()
        self._runner.close()

    def _reject_unread(self, error: WeftError) -> None:
        """Fail the requests that remain in the inbox, which the thread no longer reads. Any thread."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if message is None:
                continue
            handle, subject = message
            if isinstance(subject, Future):
                if subject.set_running_or_notify_cancel():
                    subject.set_exception(error)
            elif handle == self._core.admit:
                self._core.reject(subject, error)
