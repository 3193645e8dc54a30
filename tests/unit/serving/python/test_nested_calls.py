"""Models that call other models: what travels with a call, how it ends, and what a loop comes to."""

import asyncio
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from opentelemetry.trace import StatusCode, get_current_span
from tests.unit.serving.python.python_models import ASYNC_SOURCE, FINAL, TIMEOUT_S, call, response, value_of, values

from weft.base.core import CallContext, InferResult
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RemoteError,
    ResourceExhaustedError,
)
from weft.base.observing import telemetry
from weft.base.tensors import decode, encode
from weft.serving.calls import NestedCalls
from weft.serving.scheduler.admission import CALL_PATH_HEADER, MAX_CALL_DEPTH

#: Cancels an iteration after a response, or from another thread while it waits for the next; sends 1 for a response,
#: -1 for the error that says so, and -2 for an end.
CANCELLING = """
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        tensor = pb_utils.Tensor("IN", request.inputs()[0].as_numpy())
        called = pb_utils.InferenceRequest(model_name="other", inputs=[tensor], requested_output_names=["OUT"])
        answers = called.exec(decoupled=True)
        got = [len(next(answers).output_tensors())]
        if tensor.as_numpy()[0, 0] == 1:
            answers.cancel()
        else:
            threading.Timer(0.1, answers.cancel).start()
        for answer in answers:
            assert answer.has_error() and answer.error().code() == pb_utils.TritonError.CANCELLED
            got.append(-1)
        got.append(-2 - len(list(answers)))
        sender = request.get_response_sender()
        for value in got:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.float32([[value]]))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


class Callee:
    """Doubles IN; keeps what it was asked. ``ask`` may be replaced."""

    def __init__(self):
        self.seen = []
        self.closed = threading.Event()

    async def infer(self, call, context):
        self.seen.append((call, context))
        return await self.answer(call)

    async def answer(self, call):
        return InferResult(call.model_name, "1", outputs={"OUT": encode(2 * decode(call.inputs["IN"]))})

    async def stream_infer(self, call, context):
        self.seen.append((call, context))
        try:
            for value in range(int(decode(call.inputs["IN"])[0, 0])):
                yield InferResult(call.model_name, "1", outputs={"OUT": encode(np.float32([[value]]))}, is_final=False)  # type: ignore[arg-type]
            yield InferResult(call.model_name, "1", is_null=True)
        finally:
            self.closed.set()


class Never(Callee):
    """Never answers; says when it is asked and when it is left."""

    def __init__(self):
        super().__init__()
        self.entered, self.cancelled = threading.Event(), threading.Event()

    async def answer(self, call):
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def callee():
    """A callee that doubles."""
    return Callee()


def _calls(callee):
    return NestedCalls(callee, asyncio.get_running_loop())


def _request(pb_utils, request, **options):
    tensor = pb_utils.Tensor("IN", request.inputs()[0].as_numpy())
    return pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[tensor], **options)


def _double(requests, pb_utils):
    answers = [_request(pb_utils, request).exec() for request in requests]
    return [
        pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error() if answer.has_error() else None)
        for answer in answers
    ]


async def test_call_carries_what_the_model_set(serve_python, callee):
    """Id, version, outputs and parameters are those of the call; the outputs are the model's to change."""

    def execute(requests, pb_utils):
        cpu = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)
        answer = _request(
            pb_utils, requests[0], request_id="x", model_version=3, correlation_id=7, timeout=90,
            parameters={"k": 0.5}, priority=2, preferred_memory=cpu,
        )  # fmt: skip
        answer.set_flags(3)
        answer = answer.exec()
        array = pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
        array += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]

    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee))
    assert 11.0 == value_of(await model.infer(call(5), CallContext()))
    ((sent, _),) = callee.seen
    assert ("other", "3", "x", ["OUT"]) == (
        sent.model_name, sent.model_version, sent.request_id, [output.name for output in sent.outputs],
    )  # fmt: skip
    assert {
        "k": 0.5, "sequence_id": 7, "sequence_start": True, "sequence_end": True, "timeout": 90, "priority": 2,
    } == sent.parameters  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("no such model"),
        InvalidArgumentError("wrong shape"),
        DeadlineExceededError("late"),
        ResourceExhaustedError("full", retry_after_ms=5),
        RemoteError("ABORTED", "odd"),
        InternalError("defect"),
    ],
)
async def test_error_is_in_the_response_and_can_be_passed_on(serve_python, callee, error):
    """A failed call raises nothing in the model; a model that answers with its error passes on status and text."""

    async def fail(call):
        raise error

    callee.answer = fail
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    with pytest.raises(type(error)) as raised:
        await model.infer(call(5), CallContext())
    assert (error.code, error.message) == (raised.value.code, raised.value.message)


async def test_defect_behind_a_call_is_internal(serve_python, callee):
    """An exception that is no error of ours becomes INTERNAL without its text."""

    async def fail(call):
        raise ValueError("secret")

    callee.answer = fail
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    with pytest.raises(InternalError, match="the call of model 'other' failed") as raised:
        await model.infer(call(5), CallContext())
    assert "secret" not in raised.value.message


async def test_deadline_priority_and_headers_go_along(serve_python, callee):
    """A call has the deadline, the priority, the identity and the trace of the request that it is made for."""
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    headers = {"authorization": "key", "x-tenant": "a", "traceparent": "00-1-2-01", "user-agent": "grpc"}
    deadline_ns = time.monotonic_ns() + 10**10
    await model.infer(call(5, priority=3), CallContext(deadline_ns, headers))
    ((sent, context),) = callee.seen
    assert (deadline_ns, 3) == (context.deadline_ns, sent.parameters["priority"])
    path = context.headers.pop(CALL_PATH_HEADER)
    assert path.startswith("m.1.")
    assert {"x-tenant": "a", "traceparent": "00-1-2-01"} == context.headers


async def test_call_for_a_batch_has_the_widest_limits(serve_python, callee):
    """A call made for several requests has the latest deadline and the best priority; trace= names one of them."""

    def execute(requests, pb_utils):
        for options in ({}, {"trace": requests[1].trace()}):
            _request(pb_utils, requests[0], **options).exec()
        return [response(pb_utils, 0) for _ in requests]

    model = await serve_python(execute, is_decoupled=False, is_batching=True, caller=_calls(callee))
    soon_ns, late_ns = (time.monotonic_ns() + seconds * 10**9 for seconds in (10, 20))
    await asyncio.gather(
        model.infer(call(1, priority=2), CallContext(late_ns)), model.infer(call(2, priority=5), CallContext(soon_ns))
    )
    (both, both_context), (second, second_context) = callee.seen
    assert (late_ns, 2) == (both_context.deadline_ns, both.parameters["priority"])
    assert (soon_ns, 5) == (second_context.deadline_ns, second.parameters["priority"])


async def test_call_of_an_own_thread_belongs_to_the_request_that_it_names(serve_python, callee):
    """On a thread of the model a call belongs to no request, unless trace= names it."""

    def execute(requests, pb_utils):
        for trace in (None, requests[0].trace()):
            thread = threading.Thread(target=_request(pb_utils, requests[0], trace=trace).exec)
            thread.start()
            thread.join()
        return [response(pb_utils, 0)]

    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee))
    deadline_ns = time.monotonic_ns() + 10**10
    await model.infer(call(1), CallContext(deadline_ns))
    assert [None, deadline_ns] == [context.deadline_ns for _, context in callee.seen]


@pytest.mark.parametrize("source", ["plain", "coroutine"])
async def test_client_that_leaves_withdraws_the_call(serve_python, source):
    """When the client of a request has left, the call made for it is cancelled and the model goes on."""
    callee, went_on = Never(), threading.Event()

    def execute(requests, pb_utils):
        answer = _request(pb_utils, requests[0]).exec()
        assert pb_utils.TritonError.CANCELLED == answer.error().code()
        went_on.set()
        return [response(pb_utils, 0)]

    async def execute_async(requests, pb_utils):
        answer = await _request(pb_utils, requests[0]).async_exec()
        assert pb_utils.TritonError.CANCELLED == answer.error().code()
        went_on.set()
        return [response(pb_utils, 0)]

    options = {} if source == "plain" else {"source": ASYNC_SOURCE}
    execute = execute if source == "plain" else execute_async
    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee), **options)
    request = asyncio.ensure_future(model.infer(call(1), CallContext()))
    assert await asyncio.to_thread(callee.entered.wait, TIMEOUT_S)
    request.cancel()
    assert await asyncio.to_thread(callee.cancelled.wait, TIMEOUT_S)
    assert await asyncio.to_thread(went_on.wait, TIMEOUT_S)


async def test_coroutine_may_withdraw_its_call(serve_python):
    """Cancelling the task that awaits a call withdraws the call, and no other."""
    callee = Never()

    async def execute(requests, pb_utils):
        task = asyncio.ensure_future(_request(pb_utils, requests[0]).async_exec())
        await asyncio.to_thread(callee.entered.wait, TIMEOUT_S)
        task.cancel()
        assert await asyncio.to_thread(callee.cancelled.wait, TIMEOUT_S)
        return [response(pb_utils, 1)]

    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee), source=ASYNC_SOURCE)
    assert 1.0 == value_of(await asyncio.wait_for(model.infer(call(1), CallContext()), 2 * TIMEOUT_S))


async def test_call_ends_at_the_deadline(serve_python):
    """A model that does not answer is left at the deadline of the request, with DEADLINE_EXCEEDED."""
    callee = Never()
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    with pytest.raises(DeadlineExceededError, match="the deadline passed before model 'other' answered"):
        await model.infer(call(1), CallContext(time.monotonic_ns() + 100_000_000))
    assert callee.cancelled.is_set()


async def test_call_is_a_part_of_the_trace(serve_python, callee, exporter):
    """A call is a CLIENT span within the execution, and what is behind it continues that; an error is noted."""
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    server = telemetry.start_span("server", parent=None, kind=telemetry.SERVER)
    context = CallContext(headers={"traceparent": "00-1-2-01"}, trace_context=telemetry.context_of(server))
    await model.infer(call(1), context)

    async def fail(call):
        raise NotFoundError("nobody")

    callee.answer = fail
    with pytest.raises(NotFoundError):
        await model.infer(call(1), context)
    first, second = (span for span in exporter.get_finished_spans() if span.name == "other")
    compute = next(span for span in exporter.get_finished_spans() if span.name == "compute")
    assert server.get_span_context().span_id == compute.parent.span_id
    assert (telemetry.CLIENT, compute.context.span_id) == (first.kind, first.parent.span_id)
    inner = callee.seen[0][1]
    assert first.context.span_id == get_current_span(inner.trace_context).get_span_context().span_id
    assert "traceparent" not in inner.headers
    assert [StatusCode.UNSET, StatusCode.ERROR] == [span.status.status_code for span in (first, second)]


async def test_calls_run_side_by_side(serve_python, callee):
    """A coroutine may await several calls at once."""
    both = asyncio.Barrier(2)

    async def meet(call):
        await both.wait()
        return await Callee.answer(callee, call)

    async def execute(requests, pb_utils):
        answers = await asyncio.gather(*(_request(pb_utils, requests[0]).async_exec() for _ in range(2)))
        return [response(pb_utils, sum(answer.output_tensors()[0].as_numpy()[0, 0] for answer in answers))]

    callee.answer = meet
    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee), source=ASYNC_SOURCE)
    assert 12.0 == value_of(await asyncio.wait_for(model.infer(call(3), CallContext()), TIMEOUT_S))


async def test_responses_of_a_decoupled_model_are_iterated(serve_python, callee):
    """exec(decoupled=True) iterates over the responses as they come, the last of which is empty here."""
    sizes = []

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        for answer in _request(pb_utils, requests[0]).exec(decoupled=True):
            sizes.append(len(answer.output_tensors()))
            if answer.output_tensors():
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        sender.send(flags=FINAL)

    model = await serve_python(execute, caller=_calls(callee))
    assert [0.0, 1.0, 2.0] == await values(model, call(3))
    assert [1, 1, 1, 0] == sizes
    assert callee.closed.is_set()


@pytest.mark.parametrize("parameters", [{}, {"EXECUTION": "process"}], ids=["thread", "process"])
async def test_an_iteration_that_is_cancelled_ends_with_an_error(serve_python, callee, parameters):
    """After ``cancel``, between two responses or while one is awaited, there is CANCELLED once, and then the end."""

    async def stream_infer(call, context):
        callee.seen.append((call, context))
        try:
            yield InferResult("other", "1", outputs={"OUT": encode(np.float32([[1]]))}, is_final=False)  # type: ignore[arg-type]
            await asyncio.Event().wait()
        finally:
            callee.closed.set()

    callee.stream_infer = stream_infer
    model = await serve_python(None, source=CANCELLING, caller=_calls(callee), parameters=parameters)
    for value in (1, 2):
        callee.closed.clear()
        assert [1.0, -1.0, -2.0] == await values(model, call(value))
        assert await asyncio.to_thread(callee.closed.wait, TIMEOUT_S)


async def test_responses_are_iterated_in_a_coroutine(serve_python, callee):
    """async_exec(decoupled=True) serves ``for`` and ``async for``; an error is the last response."""

    async def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        for answer in await _request(pb_utils, requests[0]).async_exec(decoupled=True):
            if answer.output_tensors():
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        async for answer in await _request(pb_utils, requests[0]).async_exec(decoupled=True):
            if answer.output_tensors():
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        failing = pb_utils.InferenceRequest(model_name="other", inputs=[], requested_output_names=[])
        answers = [answer async for answer in await failing.async_exec(decoupled=True)]
        sender.send(answers[-1], flags=FINAL)

    model = await serve_python(execute, caller=_calls(callee), source=ASYNC_SOURCE)
    got = []
    with pytest.raises(InternalError, match="the call of model 'other' failed"):
        await values(model, call(2), got=got)
    assert [0.0, 1.0, 0.0, 1.0] == got


@pytest.mark.parametrize("error", [None, NotFoundError("no such model")])
async def test_awaited_stream_has_its_first_response(serve_python, callee, error):
    """``await async_exec(decoupled=True)`` returns with the first response, or the error, and not before."""
    is_open, got = threading.Event(), []

    async def stream_infer(call, context):
        await asyncio.to_thread(is_open.wait, TIMEOUT_S)
        if error is not None:
            raise error
        yield InferResult(call.model_name, "1", outputs={"OUT": encode(np.full((1, 1), 5, np.float32))}, is_final=False)

    async def execute(requests, pb_utils):
        awaiting = asyncio.ensure_future(_request(pb_utils, requests[0]).async_exec(decoupled=True))
        await asyncio.wait([awaiting], timeout=0.05)
        got.append(awaiting.done())
        is_open.set()
        for answer in await awaiting:  # the first is there: a plain loop does not hold the event loop up
            got.append(answer.has_error() or answer.output_tensors()[0].as_numpy()[0, 0])
            break
        return [response(pb_utils, 1)]

    callee.stream_infer = stream_infer
    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee), source=ASYNC_SOURCE)
    await asyncio.wait_for(model.infer(call(3), CallContext()), TIMEOUT_S)
    assert [False, 5.0 if error is None else True] == got


async def test_awaited_stream_may_be_withdrawn(serve_python, callee):
    """Cancelling the task that awaits the first response withdraws the call."""
    entered, closed = threading.Event(), threading.Event()

    async def stream_infer(call, context):
        entered.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            closed.set()

    async def execute(requests, pb_utils):
        task = asyncio.ensure_future(_request(pb_utils, requests[0]).async_exec(decoupled=True))
        await asyncio.to_thread(entered.wait, TIMEOUT_S)
        task.cancel()
        assert await asyncio.to_thread(closed.wait, TIMEOUT_S)
        return [response(pb_utils, 1)]

    callee.stream_infer = stream_infer
    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee), source=ASYNC_SOURCE)
    assert 1.0 == value_of(await asyncio.wait_for(model.infer(call(1), CallContext()), 2 * TIMEOUT_S))


async def test_parameters_of_responses_come_along(serve_python, callee):
    """Those of the called model are the model's to read, and each response of a stream has its own."""
    given: dict[str, Any] = {"a": 1, "b": True, "c": "x", "d": 0.5, "e": 2**63}

    async def answer(call):
        return InferResult(call.model_name, "1", parameters=given, outputs={"OUT": call.inputs["IN"]})

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        known = json.loads(_request(pb_utils, requests[0]).exec().parameters())
        for number in range(2):
            tensors = [pb_utils.Tensor("OUT", np.zeros((1, 1), np.float32))]
            sender.send(pb_utils.InferenceResponse(tensors, parameters={**known, "n": number}), FINAL * number)

    callee.answer = answer
    model = await serve_python(execute, caller=_calls(callee))
    results = [result.parameters async for result in model.stream(call(), CallContext())]
    assert [{**given, "n": 0}, {**given, "n": 1}] == results


async def test_names_may_be_bytes(serve_python, callee):
    """As the elements of a BYTES tensor are; what is no UTF-8 is an error in the model."""

    def execute(requests, pb_utils):
        names = {"model_name": b"other", "requested_output_names": [b"OUT"], "request_id": b"x", "correlation_id": b"s"}
        with pytest.raises(pb_utils.TritonModelException, match="names must be UTF-8"):
            pb_utils.InferenceRequest(model_name=b"\xff")
        return [
            pb_utils.InferenceResponse(
                pb_utils.InferenceRequest(inputs=request.inputs(), **names).exec().output_tensors()
            )
            for request in requests
        ]

    model = await serve_python(execute, is_decoupled=False, caller=_calls(callee))
    assert 10.0 == value_of(await model.infer(call(5), CallContext()))
    ((sent, _),) = callee.seen
    assert ("other", "x", ["OUT"], "s") == (
        sent.model_name, sent.request_id, [output.name for output in sent.outputs], sent.parameters["sequence_id"],
    )  # fmt: skip


async def test_wrong_calls_are_errors_in_the_model(serve_python, callee):
    """A call without a model, with no tensors, of a received request, or where there is no caller."""
    texts = []

    def execute(requests, pb_utils):
        for make in (
            lambda: pb_utils.InferenceRequest(inputs=[], requested_output_names=[]),
            lambda: pb_utils.InferenceRequest(model_name="a", inputs=[1], requested_output_names=[]),
            lambda: pb_utils.InferenceRequest(model_name="a", parameters={"a": None}),
            requests[0].exec,
            lambda: pb_utils.InferenceRequest(model_name="a").is_cancelled(),
            lambda: pb_utils.InferenceRequest(model_name="a").exec(),
        ):
            with pytest.raises(pb_utils.TritonModelException) as error:
                make()
            texts.append(error.value.message())
        return [response(pb_utils, 0)]

    model = await serve_python(execute, is_decoupled=False)
    await model.infer(call(1), CallContext())
    assert [
        "model_name must not be empty: it says which model is called",
        "inputs must be pb_utils.Tensor objects, got [<class 'int'>]",
        "request parameters must be bool, 64-bit int, float or str by name, got 'a': None",
        "a request that execute received cannot be executed; make an InferenceRequest",
        "only a request that execute received has this; the model made this one",
        "this model cannot call other models: no service runs it",
    ] == texts


class Back(Callee):
    """Sends a call back to the model that made it."""

    def __init__(self):
        super().__init__()
        self.model = None

    async def infer(self, call, context):
        return await self.model.infer(call, context)


def _countdown(requests, pb_utils):
    """Calls itself with one less, until 0."""
    answers = []
    for request in requests:
        value = request.inputs()[0].as_numpy()[0, 0]
        if value == 0:
            answers.append(response(pb_utils, 100))
            continue
        tensor = pb_utils.Tensor("IN", np.float32([[value - 1]]))  # type: ignore[arg-type]
        answer = pb_utils.InferenceRequest(model_name="m", inputs=[tensor], requested_output_names=["OUT"]).exec()
        error = answer.error() if answer.has_error() else None
        answers.append(pb_utils.InferenceResponse(answer.output_tensors(), error=error))
    return answers


@pytest.mark.parametrize(("num_instances", "depth"), [(1, 0), (2, 1), (4, 3)])
async def test_model_may_call_itself_while_it_has_free_instances(serve_python, num_instances, depth):
    """A model that calls itself answers as long as an instance is free for each call."""
    callee = Back()
    model = await serve_python(_countdown, is_decoupled=False, num_instances=num_instances, caller=_calls(callee))
    callee.model = model
    assert 100.0 == value_of(await asyncio.wait_for(model.infer(call(depth), CallContext()), TIMEOUT_S))


@pytest.mark.parametrize(
    ("num_instances", "where"), [(1, "its only instance waits"), (2, "all of its 2 instances wait")]
)
async def test_model_that_waits_for_itself_is_refused(serve_python, num_instances, where):
    """A call that no instance can ever take ends in an error that says so, and the model serves on."""
    callee = Back()
    model = await serve_python(_countdown, is_decoupled=False, num_instances=num_instances, caller=_calls(callee))
    callee.model = model
    for _ in range(2):
        with pytest.raises(
            ResourceExhaustedError, match=f"'m' calls itself, directly or through others, while {where}"
        ):
            await asyncio.wait_for(model.infer(call(num_instances), CallContext()), TIMEOUT_S)
    assert 100.0 == value_of(await model.infer(call(0), CallContext()))


async def test_two_requests_that_wait_for_one_another_do_not_hang(serve_python):
    """Two instances, each of which calls the model: one call is refused, which frees an instance for the other."""
    callee, both = Back(), threading.Barrier(2)

    def execute(requests, pb_utils):
        if requests[0].inputs()[0].as_numpy()[0, 0] > 0:
            both.wait(TIMEOUT_S)
        return _countdown(requests, pb_utils)

    model = await serve_python(execute, is_decoupled=False, num_instances=2, caller=_calls(callee))
    callee.model = model
    pair = asyncio.gather(*(model.infer(call(1), CallContext()) for _ in range(2)), return_exceptions=True)
    outcomes = await asyncio.wait_for(pair, TIMEOUT_S)
    assert [False, True] == sorted(isinstance(outcome, ResourceExhaustedError) for outcome in outcomes)


async def test_loop_of_calls_is_bounded(serve_python, callee):
    """A call nested too deeply is refused with the names on its path."""
    model = await serve_python(_double, is_decoupled=False, caller=_calls(callee))
    path = ">".join(f"m{number}%3E.1.abc" for number in range(MAX_CALL_DEPTH))
    with pytest.raises(
        InvalidArgumentError, match=f"more than {MAX_CALL_DEPTH} deep: m0> > m1> > .* > m > other; a model"
    ):
        await model.infer(call(1), CallContext(headers={CALL_PATH_HEADER: path}))
    assert [] == callee.seen
