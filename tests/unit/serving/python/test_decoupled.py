"""Decoupled models: any number of responses to a request, sent when and from where the model likes."""

import asyncio
import gc
import queue
import threading
import time
import weakref

import pytest
from tests.unit.serving.python.python_models import ASYNC_SOURCE, FINAL, TIMEOUT_S, call, response, value_of, values

from weft.base.core import CallContext
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.serving.backends.python.runner import Coroutines, PythonModelRunner
from weft.serving.queues.settings import WaitPolicy
from weft.serving.request.stream import MAX_WAITING, MAX_WAITING_BYTES, SendWindow


def _count_up(requests, pb_utils):
    """As many responses as IN says, then the flag alone."""
    for request in requests:
        sender = request.get_response_sender()
        for value in range(int(request.inputs()[0].as_numpy()[0, 0])):
            sender.send(response(pb_utils, value))
        sender.send(flags=FINAL)


@pytest.mark.parametrize("count", [0, 1, 5, 3 * MAX_WAITING])
async def test_any_number_of_responses(serve_python, count):
    """None, one or many responses come in the order sent; the last thing that comes says that it is the last."""
    model = await serve_python(_count_up)
    results = [result async for result in model.stream(call(count), CallContext())]
    assert list(range(count)) == [value_of(result) for result in results if not result.is_null]
    assert [False] * count + [True] == [result.is_final for result in results]
    assert results[-1].is_null
    assert {f"r{count}"} == {result.request_id for result in results}


async def test_last_response_may_carry_the_flag(serve_python):
    """A response sent with the final flag is the last result itself."""

    def execute(requests, pb_utils):
        requests[0].get_response_sender().send(response(pb_utils, 7), flags=FINAL)

    model = await serve_python(execute)
    (result,) = [result async for result in model.stream(call(), CallContext())]
    assert (7.0, True, False) == (value_of(result), result.is_final, result.is_null)


async def test_responses_may_be_sent_late_from_other_threads(serve_python):
    """Requests of one batch are answered by threads after execute has returned, while another batch is executed."""
    returned = threading.Semaphore(0)

    def answer(sender, value, pb_utils):
        for _ in range(2):
            assert returned.acquire(timeout=TIMEOUT_S)
        returned.release(2)
        sender.send(response(pb_utils, value))
        sender.send(flags=FINAL)

    def execute(requests, pb_utils):
        for request in requests:
            value = request.inputs()[0].as_numpy()[0, 0]
            threading.Thread(target=answer, args=(request.get_response_sender(), value, pb_utils)).start()
        returned.release()

    model = await serve_python(execute)
    assert [[1.0], [2.0]] == await asyncio.gather(values(model, call(1)), values(model, call(2)))  # type: ignore[comparison-overlap]


async def test_the_request_goes_on_after_an_error(serve_python):
    """An error in the middle is a response with the status of its code; others follow, and the request succeeds."""

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        sender.send(response(pb_utils, 1))
        error = pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND)
        sender.send(pb_utils.InferenceResponse(error=error))
        sender.send(response(pb_utils, 2), FINAL)

    model = await serve_python(execute)
    first, failed, last = [result async for result in model.stream(call(), CallContext())]
    assert (1.0, 2.0, True) == (value_of(first), value_of(last), last.is_final)
    assert ("NOT_FOUND", "no such row", {}) == (failed.error.code, failed.error.message, failed.outputs)
    assert (False, False) == (failed.is_final, failed.is_null)
    assert (1, 0) == (model.statistics.success.count, model.statistics.fail.count)
    assert 1 == model.statistics.responses[1].fail.count


async def test_a_last_error_ends_the_request_after_the_responses_before_it(serve_python):
    """With the flag for the last response an error fails the request."""

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        sender.send(response(pb_utils, 1))
        error = pb_utils.TritonError("no more rows", pb_utils.TritonError.NOT_FOUND)
        sender.send(pb_utils.InferenceResponse(error=error), FINAL)

    model = await serve_python(execute)
    got = []
    with pytest.raises(NotFoundError, match="no more rows"):
        await values(model, call(), got=got)
    assert [1.0] == got
    assert (0, 1) == (model.statistics.success.count, model.statistics.fail.count)


async def test_wrong_use_of_the_sender_is_an_error_in_the_model(serve_python):
    """After the last response, without a response, with an unknown flag or a wrong type: send raises."""
    texts = []

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        for arguments in ((), (response(pb_utils, 1), 4), ([],)):
            with pytest.raises(pb_utils.TritonModelException) as error:
                sender.send(*arguments)
            texts.append(error.value.message())
        requests[0].get_response_sender().send(flags=FINAL)
        with pytest.raises(pb_utils.TritonModelException) as error:
            sender.send(response(pb_utils, 1))
        texts.append(error.value.message())

    model = await serve_python(execute)
    assert [] == await values(model, call())
    await model.stop(grace_s=TIMEOUT_S)
    assert [
        "Inference Response object must be provided when the response flags is set to zero.",
        "Unable to send response. Unsupported flag provided: 4; use 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL",
        "send takes an InferenceResponse, got list",
        "Unable to send response. Response sender has been closed.",
    ] == texts


def _raise(requests, pb_utils):
    requests[0].get_response_sender().send(response(pb_utils, 1))
    raise ValueError("secret")


def _exit(requests, pb_utils):
    requests[0].get_response_sender().send(response(pb_utils, 1))
    raise SystemExit(3)


def _return(requests, pb_utils):
    requests[0].get_response_sender().send(response(pb_utils, 1))
    return [response(pb_utils, 2)]


def _forget(requests, pb_utils):
    requests[0].get_response_sender().send(response(pb_utils, 1))


def _raise_on_purpose(requests, pb_utils):
    requests[0].get_response_sender().send(response(pb_utils, 1))
    raise pb_utils.TritonModelException("no such user")


@pytest.mark.parametrize(
    ("execute", "message"),
    [
        (_raise, "model 'm' failed to execute the request"),
        (_exit, "model 'm' failed to execute the request"),
        (_return, "'m' is using the decoupled mode and the execute function must return None, got list"),
        (_forget, "the model dropped the request without a last response"),
        (_raise_on_purpose, "for model 'm_0', message: TritonModelException: no such user"),
    ],
)
async def test_bad_model_fails_its_request_after_what_it_sent(serve_python, execute, message):
    """What a model does wrong is INTERNAL after the response that was right, and the instance serves on."""
    model = await serve_python(execute)
    for _ in range(2):
        got = []
        with pytest.raises(InternalError, match=message):
            await values(model, call(), got=got)
        assert [1.0] == got
    assert {"BACKEND": 2} == model.statistics.failures_by_reason


async def test_client_that_leaves_stops_the_model(serve_python):
    """Closing the responses makes is_cancelled true, frees a send that waits, and drops what is sent later."""
    ended = threading.Event()

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        while not sender.is_cancelled():
            sender.send(response(pb_utils, 1))
        assert requests[0].is_cancelled()
        sender.send(response(pb_utils, 2), flags=FINAL)
        ended.set()

    model = await serve_python(execute)
    results = model.stream(call(), CallContext())
    assert 1.0 == value_of(await anext(results))
    await results.aclose()
    assert await asyncio.to_thread(ended.wait, TIMEOUT_S)
    assert {"CANCELED": 1} == model.statistics.failures_by_reason
    assert 1 == sum(entry.cancel.count for entry in model.statistics.responses.values())


async def test_slow_reader_slows_the_model_down_and_nobody_else(serve_python):
    """The model waits when so many responses are not read; another instance serves meanwhile."""
    sent, waits = [], threading.Event()

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        if requests[0].request_id() != "r1":
            sender.send(flags=FINAL)
            return
        for value in range(2 * MAX_WAITING):
            sent.append(value)
            if value == MAX_WAITING:
                waits.set()
            sender.send(response(pb_utils, value))
        sender.send(flags=FINAL)

    model = await serve_python(execute, num_instances=2)
    results = model.stream(call(1), CallContext())
    first = asyncio.ensure_future(anext(results))
    assert await asyncio.to_thread(waits.wait, TIMEOUT_S)
    assert 0.0 == value_of(await first)
    for number in range(20):
        assert [] == await values(model, call(number + 2))
    assert len(sent) <= MAX_WAITING + 2  # one was read, one waits in send
    assert list(range(1, 2 * MAX_WAITING)) == [value_of(r) async for r in results if not r.is_null]


async def test_large_responses_wait_by_their_bytes(serve_python):
    """Of large responses fewer may wait; one may, however large it is."""
    columns = MAX_WAITING_BYTES // 8  # a response of half of the bytes
    sent, waits = [], threading.Event()

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        for number, size in enumerate((columns, columns, columns, 3 * columns)):
            sent.append(number)
            if number == 2:
                waits.set()
            sender.send(response(pb_utils, number, size))
        sender.send(flags=FINAL)

    model = await serve_python(execute)
    results = model.stream(call(1), CallContext())
    task = asyncio.ensure_future(anext(results))
    assert await asyncio.to_thread(waits.wait, TIMEOUT_S)
    assert 0.0 == value_of(await task)
    assert [1.0, 2.0, 3.0] == [value_of(result) async for result in results if not result.is_null]
    assert [0, 1, 2, 3] == sent


def test_window_is_full_by_number_or_by_bytes():
    """A sender waits for the 17th response or for more than 16 MiB, until one is taken or nobody reads any longer."""
    for sizes in ([0] * MAX_WAITING, [MAX_WAITING_BYTES // 2, MAX_WAITING_BYTES // 2], [3 * MAX_WAITING_BYTES]):
        window, passed = SendWindow(), []
        assert all(window.enter(size) for size in sizes)
        has_passed = threading.Semaphore(0)

        def send(window=window, passed=passed, has_passed=has_passed):
            for _ in range(2):
                passed.append(window.enter(1))
                has_passed.release()

        thread = threading.Thread(target=send)
        thread.start()
        assert not has_passed.acquire(timeout=0.05)
        window.leave()
        assert has_passed.acquire(timeout=TIMEOUT_S)
        window.close()
        thread.join(TIMEOUT_S)
        assert passed[0] is True
        assert window.enter(1) is False


async def test_deadline_ends_a_stream(serve_python):
    """A model that never finishes is left at the deadline: its request fails, and is_cancelled tells the model."""
    ended = threading.Event()

    def watch(request, pb_utils):
        sender = request.get_response_sender()
        sender.send(response(pb_utils, 1))
        while not sender.is_cancelled():
            time.sleep(0.001)  # a model that polls
        ended.set()

    def execute(requests, pb_utils):
        threading.Thread(target=watch, args=(requests[0], pb_utils)).start()

    model = await serve_python(execute)
    got = []
    with pytest.raises(DeadlineExceededError, match="the deadline passed before the last response"):
        await values(model, call(), CallContext(time.monotonic_ns() + 100_000_000), got=got)
    assert [1.0] == got
    assert await asyncio.to_thread(ended.wait, TIMEOUT_S)
    assert {"REJECTED": 1} == model.statistics.failures_by_reason


async def test_refused_requests_fail_before_any_response(serve_python):
    """A request that does not fit, one that finds the queue full, and one that is withdrawn from the queue."""
    goes_on, entered = threading.Event(), threading.Event()

    def execute(requests, pb_utils):
        entered.set()
        assert goes_on.wait(TIMEOUT_S)
        _count_up(requests, pb_utils)

    model = await serve_python(execute, is_batching=True, default_policy=WaitPolicy(max_queue_size=1))
    running = asyncio.ensure_future(values(model, call(1)))
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    queued = model.stream(call(2), CallContext())
    waiting = asyncio.ensure_future(anext(queued))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError):
        await values(model, call(3))
    waiting.cancel()
    await asyncio.wait([waiting])
    wrong = call(1)
    wrong.inputs = {}
    with pytest.raises(InvalidArgumentError, match="missing required input"):
        await values(model, wrong)
    goes_on.set()
    assert [0.0] == await running
    assert {"REJECTED": 1, "CANCELED": 1, "OTHER": 1} == model.statistics.failures_by_reason
    assert 0 == model.statistics.pending_count


async def test_statistics_add_up(serve_python):
    """A request counts once, with the time until its last response; responses count by number."""
    entered, goes_on = threading.Event(), threading.Event()

    def execute(requests, pb_utils):
        entered.set()
        assert goes_on.wait(TIMEOUT_S)
        _count_up(requests, pb_utils)

    model = await serve_python(execute)
    running = asyncio.ensure_future(values(model, call(0)))
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    waiting = [asyncio.ensure_future(values(model, call(count))) for count in (2, 3)]
    await asyncio.sleep(0.05)  # time in the queue, which no response counts as its own
    goes_on.set()
    await asyncio.gather(running, *waiting)
    await model.stop(grace_s=TIMEOUT_S)
    statistics = model.statistics
    assert (3, 3, 3) == (statistics.success.count, statistics.inference_count, statistics.execution_count)
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert sum(part.total_ns for part in parts) <= statistics.success.total_ns
    responses = sum(r.success.total_ns + r.empty_response.total_ns for r in statistics.responses.values())
    assert responses <= statistics.compute_infer.total_ns
    counts = {n: (r.success.count, r.empty_response.count, r.fail.count) for n, r in statistics.responses.items()}
    assert {0: (2, 1, 0), 1: (2, 0, 0), 2: (1, 1, 0), 3: (0, 1, 0)} == counts
    computed = [(r.compute_infer.count, r.compute_output.count) for _, r in sorted(statistics.responses.items())]
    assert [(3, 2), (2, 2), (2, 1), (1, 0)] == computed
    assert all(r.success.total_ns + r.empty_response.total_ns == r.compute_infer.total_ns + r.compute_output.total_ns
               for r in statistics.responses.values())  # fmt: skip


async def test_failed_response_counts_as_computed(serve_python):
    """As in Triton Inference Server: it took the model its time."""

    def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        sender.send(response(pb_utils, 1))
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no")), FINAL)

    model = await serve_python(execute)
    with pytest.raises(InternalError, match="no"):
        await values(model, call())
    first, second = (model.statistics.responses[number] for number in range(2))
    assert (1, 1, 1, 0) == (
        first.compute_infer.count,
        first.compute_output.count,
        first.success.count,
        first.fail.count,
    )
    assert (1, 0, 1) == (second.compute_infer.count, second.success.count, second.fail.count)
    assert second.fail.total_ns == second.compute_infer.total_ns + second.compute_output.total_ns


async def test_stop_waits_for_streams(serve_python):
    """A stop waits for the last responses of what was executed; what is not ended after the grace is UNAVAILABLE."""
    senders = []

    def execute(requests, pb_utils):
        senders.extend((request.get_response_sender(), pb_utils) for request in requests)
        senders[-1][0].send(response(pb_utils, 1))

    model = await serve_python(execute)
    good, bad = (model.stream(call(number), CallContext()) for number in range(2))
    assert [1.0, 1.0] == [value_of(await anext(results)) for results in (good, bad)]
    stopping = asyncio.ensure_future(model.stop(grace_s=0.5))
    await asyncio.sleep(0)
    senders[0][0].send(response(senders[0][1], 2), flags=FINAL)
    assert [2.0] == [value_of(result) async for result in good]
    assert not stopping.done()
    with pytest.raises(UnavailableError, match="is not at ready state"):
        await anext(bad)
    await stopping
    senders[1][0].send(response(senders[1][1], 3))  # nobody listens, and nothing breaks
    assert senders[1][0].is_cancelled()


async def test_coroutines_of_several_batches_run_together(serve_python):
    """A coroutine does not hold its instance: two requests wait for one another. One that fails fails its own."""
    events = {}

    async def execute(requests, pb_utils):
        (request,) = requests
        value = request.inputs()[0].as_numpy()[0, 0]
        if value == 3:
            raise ValueError("secret")
        if value == 4:
            raise SystemExit(3)
        if value == 5:
            return 5
        for number in (1, 2):
            events.setdefault(number, asyncio.Event())
        events[value].set()
        await events[3 - value].wait()
        request.get_response_sender().send(response(pb_utils, value), flags=FINAL)

    model = await serve_python(execute, source=ASYNC_SOURCE)
    pair = asyncio.gather(values(model, call(1)), values(model, call(2)))
    assert [[1.0], [2.0]] == await asyncio.wait_for(pair, TIMEOUT_S)  # type: ignore[comparison-overlap]
    for value, text in ((3, "failed to execute"), (4, "failed to execute"), (5, "must return None, got int")):
        with pytest.raises(InternalError, match=text):
            await values(model, call(value))


async def test_coroutine_that_ends_before_the_batch_is_begun(serve_python, monkeypatch):
    """It has an outcome all the same, which a process needs."""
    start, execute_batch, counts = Coroutines.start, PythonModelRunner._execute_decoupled, queue.SimpleQueue()

    def start_and_wait(self, coroutine, on_end):
        ended = threading.Event()

        def on_end_and_set(result, error):
            on_end(result, error)
            ended.set()

        start(self, coroutine, on_end_and_set)
        assert ended.wait(TIMEOUT_S)

    async def execute(requests, pb_utils):
        requests[0].get_response_sender().send(response(pb_utils, 1), flags=FINAL)

    def kept(self, batch):
        found = execute_batch(self, batch)
        counts.put(len(found))
        return found

    monkeypatch.setattr(Coroutines, "start", start_and_wait)
    monkeypatch.setattr(PythonModelRunner, "_execute_decoupled", kept)
    model = await serve_python(execute, source=ASYNC_SOURCE)
    assert [1.0] == await values(model, call())
    assert 1 == await asyncio.to_thread(counts.get, timeout=TIMEOUT_S)


async def test_coroutine_is_cancelled_when_the_model_stops(serve_python):
    """A coroutine that never ends neither keeps a stop waiting nor outlives it."""
    cancelled = threading.Event()

    async def execute(requests, pb_utils):
        requests[0].get_response_sender().send(response(pb_utils, 1))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    model = await serve_python(execute, source=ASYNC_SOURCE)
    results = model.stream(call(), CallContext())
    assert 1.0 == value_of(await anext(results))
    await asyncio.wait_for(model.stop(grace_s=0.0), TIMEOUT_S)
    assert await asyncio.to_thread(cancelled.wait, TIMEOUT_S)
    with pytest.raises(UnavailableError):
        await anext(results)


async def test_coroutine_that_waits_is_not_collected(serve_python):
    """A coroutine that waits for what only it knows lives on when garbage is collected, and goes on."""
    waiting, is_waiting = [], threading.Event()

    async def execute(requests, pb_utils):
        sender = requests[0].get_response_sender()
        event = asyncio.Event()
        waiting.append(weakref.ref(event))
        sender.send(response(pb_utils, 1))
        asyncio.get_running_loop().call_soon(is_waiting.set)  # runs once the coroutine waits
        await event.wait()
        sender.send(response(pb_utils, 2), flags=FINAL)

    model = await serve_python(execute, source=ASYNC_SOURCE)
    results = model.stream(call(), CallContext())
    assert 1.0 == value_of(await anext(results))
    assert await asyncio.to_thread(is_waiting.wait, TIMEOUT_S)
    gc.collect()
    event = waiting[0]()
    assert event is not None
    event._loop.call_soon_threadsafe(event.set)  # type: ignore[attr-defined]
    assert 2.0 == value_of(await anext(results))


async def test_nothing_of_a_request_stays(serve_python):
    """A request that has had its last response is freed at once, with its tensors, long before its deadline."""
    requests_seen, tensors_seen = [], []

    def execute(requests, pb_utils):
        requests_seen.append(weakref.ref(requests[0]))
        tensors_seen.append(weakref.ref(requests[0]._served.array("IN")))
        requests[0].get_response_sender().send(response(pb_utils, 1), flags=FINAL)

    model = await serve_python(execute)
    gc.disable()
    try:
        for _ in range(2):
            assert [1.0] == await values(model, call(), CallContext(time.monotonic_ns() + 10**12))
        await model.stop(grace_s=TIMEOUT_S)
        assert [None] * 4 == [reference() for reference in requests_seen + tensors_seen]
        assert set() == model.answers.unfinished
    finally:
        gc.enable()
