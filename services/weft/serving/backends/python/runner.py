"""Loads and runs a ``TritonPythonModel``, in the service or in a process of its own."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Token
from functools import partial
from pathlib import Path
from typing import Any

from opentelemetry.context import Context, attach, detach

from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing.failures import caused_by, disclose
from weft.base.observing.logs import get_logger
from weft.base.observing.telemetry import context_of
from weft.base.processes.forks import end_copies
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.backends.loading import model_file
from weft.serving.backends.python.loader import (
    NothingInline,
    describe,
    load_module,
    model_class_of,
    unload_module,
    utils_of,
)
from weft.serving.backends.python.pb_utils import for_model
from weft.serving.backends.python.requests import InferenceRequest, in_work
from weft.serving.backends.python.responses import (
    InferenceResponse,
    OutputStream,
    Reply,
    TritonModelException,
    weft_error,
)
from weft.serving.request.request import RESCHEDULED, STREAMED, Outcome
from weft.serving.request.request import InferenceRequest as ServedRequest
from weft.serving.request.request import InferenceResponse as Response

FILENAME = "model.py"

_log = get_logger("weft.python")
#: Time that a close waits for cancelled coroutines, in seconds.
_CLOSE_WAIT_S = 5.0


class PythonModelRunner:
    """One loaded model; used by one thread."""

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        self._context = model
        self._instance = instance
        self._name = model.signature.name
        self._coroutines: Coroutines | None = None
        self._is_iterative = bool(model.config.get("sequence_batching", {}).get("iterative_sequence"))
        names = tuple(spec.name for spec in model.signature.outputs)
        self._wrap = partial(InferenceRequest.wrap, can_reschedule=self._is_iterative, all_outputs=names)
        self.execute = self._execute_decoupled if model.signature.is_decoupled else self._execute

    def load(self) -> None:
        """Import the model and call its ``initialize``. Raises a WeftError with the reason of a failure."""
        context = self._context
        end_copies()
        path = model_file(context, FILENAME)
        origin = self._instance.origin(context.signature)
        caller, control = context.caller, context.control
        if self._instance.is_inline:
            caller = control = NothingInline()
        module = load_module(path, utils_of(context.directory, caller, origin, self._name, context.metrics, control))
        try:
            self._model = self._initialized(model_class_of(module, path), path)
        except BaseException:
            self._release_metrics()
            unload_module(module)
            raise
        self._module = module

    def close(self) -> None:
        """Call ``finalize`` of the model, and forget its modules."""
        if self._coroutines is not None:
            self._coroutines.close()
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException:  # a SystemExit too: the instance ends anyway, in its own way
            _log.exception("finalize failed", extra={"model": self._name})
        finally:
            self._release_metrics()
            unload_module(self._module)

    def _release_metrics(self) -> None:
        if self._context.metrics is not None:
            self._context.metrics.release(self._instance.origin(self._context.signature))

    def _initialized(self, model_class: Any, path: Path) -> Any:
        context = self._context
        try:
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(
                    {
                        "model_config": json.dumps(for_model(context.config)),
                        "model_instance_kind": self._instance.kind,
                        "model_instance_name": self._instance.name,
                        "model_instance_device_id": str(self._instance.device_id),
                        "model_repository": str(context.directory.parent),
                        "model_version": context.signature.version,
                        "model_name": self._name,
                    }
                )
        except Exception as error:
            where = describe(error, context.directory.parent)
            failure = InvalidArgumentError(f"model '{self._name}' failed to initialize: {where}")
            raise caused_by(failure, error) from error
        execute = getattr(model, "execute", None)  # ``initialize`` may have set it
        if execute is None:
            raise InvalidArgumentError(f"{path}: TritonPythonModel has no method execute")
        if inspect.iscoroutinefunction(execute):
            if self._instance.is_inline:
                raise InvalidArgumentError(
                    f"{path}: execute is a coroutine, which runs on a thread; remove the parameter EXECUTION inline"
                )
            self._coroutines = Coroutines(self._instance.name)
        return model

    @property
    def can_overlap(self) -> bool:
        """Whether ``start`` may be called in place of ``execute``: ``execute`` of the model is a coroutine."""
        return self._coroutines is not None and not (self._is_iterative or self._context.signature.is_decoupled)

    def start(self, batch: Batch, on_end: Callable[[list[Outcome] | None, BaseException | None], None]) -> None:
        """Execute a batch beside others; ``on_end`` gets its outcomes, or the error, on the coroutines' thread."""
        if self._coroutines is not None:
            self._coroutines.start(self._execute_beside(batch), on_end)

    def _execute(self, batch: Batch) -> list[Outcome]:
        requests = list(map(self._wrap, batch.requests))
        batch.infer_start_ns = time.monotonic_ns()
        token = in_work.set(batch.requests)
        span_token = _enter_span(batch) if batch.requests[0].span else None  # of recorded spans
        try:
            responses = self._model.execute(requests.copy())  # models may change the list
            if self._coroutines is not None:
                responses = self._coroutines.run(responses)
        except BaseException as error:
            return self._after_error(requests, error)
        finally:
            in_work.reset(token)
            if span_token is not None:
                detach(span_token)
        return self._outcomes(batch, responses, *self._replies(requests))

    async def _execute_beside(self, batch: Batch) -> list[Outcome]:
        requests = list(map(self._wrap, batch.requests))
        batch.infer_start_ns = time.monotonic_ns()
        in_work.set(batch.requests)  # of this task
        if batch.requests[0].span:
            _enter_span(batch)
        try:
            responses = await self._model.execute(requests.copy())
        except BaseException as error:
            return self._after_error(requests, error)
        again, replies = self._replies(requests)
        for reply in replies:
            if reply is not None and not reply.has_ended:
                await asyncio.to_thread(reply.wait_until_ended)
        return self._outcomes(batch, responses, again, replies)

    def _after_error(self, requests: list[InferenceRequest], error: BaseException) -> list[Outcome]:
        """The outcomes where the model had sent one response at least; else raises the error."""
        answers = [None if request.reply is None else request.reply.answer for request in requests]
        for request in requests:
            request.disclaim()
        if not any(answers):
            if isinstance(error, TritonModelException):
                raise self._failed(error) from error
            raise error
        failure = error if isinstance(error, WeftError) else self._failed(error)
        if isinstance(failure, InternalError) and failure is not error:
            _log.error(failure.message, exc_info=error, extra={"model": self._name, "error_id": failure.error_id})
        return [failure if answer is None else self._outcome(answer) for answer in answers]

    def _replies(self, requests: list[InferenceRequest]) -> tuple[list[bool], list[Reply | None]]:
        """Which requests are scheduled again, and the replies of the others; forgets the requests.

        The model may have dropped the last other reference to one, and then no answer follows.
        """
        again = [request.is_rescheduled for request in requests] if self._is_iterative else []
        replies = [None if request.is_rescheduled else request.reply for request in requests]
        while requests:
            if (request := requests.pop()).is_rescheduled:
                request.disclaim()
        return again, replies

    def _outcomes(self, batch: Batch, responses: Any, again: list[bool], replies: list[Reply | None]) -> list[Outcome]:
        if any(replies):
            responses = self._with_replies(responses, replies)
        batch.infer_end_ns = time.monotonic_ns()
        num_responses = len(responses) if isinstance(responses, list | tuple) else 0
        if num_responses != len(batch.requests):
            raise InternalError(
                f"model '{self._name}' returned {num_responses} responses for {len(batch.requests)} requests; "
                "execute must return a list with one InferenceResponse per request"
            )
        if not any(again):
            return list(map(self._outcome, responses))
        return [
            self._again(response) if is_again else self._outcome(response)
            for response, is_again in zip(responses, again, strict=True)
        ]

    def _with_replies(self, responses: Any, replies: list[Reply | None]) -> Any:
        """The returned responses, with the sent ones where the model returned None, or had sent the last one."""
        if responses is None:
            responses = [None] * len(replies)
        if not isinstance(responses, list | tuple) or len(responses) != len(replies):
            return responses
        joined: list[Any] = []
        for response, reply in zip(responses, replies, strict=True):
            try:
                is_sent = reply is not None and (response is None or reply.answer is not None)
                joined.append(self._sent(reply) if reply is not None and is_sent else response)
            except WeftError as error:
                joined.append(error)
        return joined

    def _sent(self, reply: Reply) -> InferenceResponse:
        """The response that the model sends; waits for it. Raises a WeftError where there is none."""
        if self._instance.is_inline and not reply.has_ended:
            raise InternalError(
                f"model '{self._name}' has the parameter EXECUTION inline and did not send its response before execute "
                "returned"
            )
        return reply.wait()

    def _execute_decoupled(self, batch: Batch) -> list[Outcome]:
        outlets = [self._outlet(request) for request in batch.requests]
        requests = list(map(self._wrap, batch.requests, outlets))
        result = None
        token = in_work.set(batch.requests)
        span_token = _enter_span(batch) if batch.requests[0].span else None  # of recorded spans
        try:
            batch.infer_start_ns = time.monotonic_ns()
            if self._coroutines is None:
                result = self._model.execute(requests.copy())
            elif self._is_iterative:  # what it schedules again is known when it has ended
                result = self._coroutines.run(self._model.execute(requests.copy()))
            else:
                self._coroutines.start(self._model.execute(requests.copy()), partial(self._on_end, requests.copy()))
        except BaseException as error:
            for request in requests:
                request.disclaim()
            if isinstance(error, TritonModelException):
                raise self._failed(error) from error
            raise
        finally:
            in_work.reset(token)
            if span_token is not None:
                detach(span_token)
        batch.infer_end_ns = time.monotonic_ns()
        if result is not None:
            for request in requests:
                request.disclaim()
            raise self._not_none(result)
        outcomes: list[Outcome] = []
        for request in requests:
            outcomes.append(RESCHEDULED if request.is_rescheduled else STREAMED)
            if request.is_rescheduled:
                request.disclaim()  # the next execution has a sender of its own
        return outcomes

    def _again(self, response: object) -> Outcome:
        if response is None:
            return RESCHEDULED
        error = InternalError(
            "Expected a None object in the execute function return list for rescheduled request, got "
            f"{type(response).__name__}; a request that is scheduled again is answered later"
        )
        _log.error(error.message, extra={"error_id": error.error_id, "model": self._name})
        return error

    def _on_end(self, requests: list[InferenceRequest], result: Any, error: BaseException | None) -> None:
        failure = None if result is None else self._not_none(result)
        if error is not None:
            failure = self._failed(error)
        if failure is not None:
            _log.error(failure.message, exc_info=error, extra={"model": self._name, "error_id": failure.error_id})
            for request in requests:
                request.fail(failure)
        requests.clear()

    def _failed(self, error: BaseException) -> InternalError:
        """The error for clients: with the text of what a model raises on purpose, and of nothing else."""
        failure = InternalError(f"model '{self._name}' failed to execute the request")
        if isinstance(error, TritonModelException):
            failure = InternalError(
                f"Failed to process the request(s) for model '{self._instance.name}', message: "
                f"TritonModelException: {error}"
            )
        return disclose(failure, error)

    def _not_none(self, result: object) -> InternalError:
        return InternalError(
            f"Python model '{self._name}' is using the decoupled mode and the execute function must return None, got "
            f"{type(result).__name__}"
        )

    def _outlet(self, served: ServedRequest) -> OutputStream:
        stream = served.stream
        if stream is None:  # a warm-up, or the client has left
            return OutputStream(lambda response, is_final: None, lambda error: None)

        def send(response: InferenceResponse | None, is_final: bool) -> None:
            stream.send(None if response is None else self._outcome(response), is_final=is_final)

        def fail(error: WeftError) -> None:
            if served.is_withdrawn:  # it has failed, or is about to
                stream.drop()
            else:
                stream.lose(error)

        return OutputStream(send, fail)

    def _outcome(self, response: Any) -> Outcome:
        if isinstance(response, InferenceResponse) and (error := response.error()) is None:
            return Response(*response.contents())
        if isinstance(response, InferenceResponse):
            outcome = weft_error(error)
        elif isinstance(response, WeftError):
            outcome = response
        else:
            outcome = InternalError(
                f"model '{self._name}' returned {type(response).__name__} in place of an InferenceResponse"
            )
        if isinstance(outcome, InternalError):
            _log.error(outcome.message, extra={"error_id": outcome.error_id, "model": self._name})
        return outcome


def _enter_span(batch: Batch) -> "Token[Context]":
    """Make the span of the batch's first sampled request the current one."""
    spans = [request.span for request in batch.requests if request.span is not None]
    return attach(context_of(next((s for s in spans if s.get_span_context().trace_flags.sampled), spans[0])))


class Coroutines:
    """An event loop on a thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        #: A loop knows its tasks by weak references: one that waits for what only it knows would be collected.
        self._started: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine and return its result."""
        return asyncio.run_coroutine_threadsafe(_guarded(coroutine), self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], on_end: Callable[[Any, BaseException | None], None]) -> None:
        """Start the coroutine; ``on_end`` is called on the loop with its result, or with its error."""

        async def watched() -> None:
            try:
                result = await _guarded(coroutine)
            except asyncio.CancelledError as error:
                on_end(None, error)
                raise
            except Exception as error:
                on_end(None, error)
            else:
                on_end(result, None)

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        self._started.add(future)
        future.add_done_callback(self._started.discard)

    def close(self) -> None:
        """Cancel every coroutine, and end the thread unless one of them blocks it."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_CLOSE_WAIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_CLOSE_WAIT_S / 2)
        self._loop.stop()


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The same coroutine; an exit, or the like, would end the loop and is an error instead."""
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(f"execute raised {type(error).__name__}") from error
