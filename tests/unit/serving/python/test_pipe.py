"""The pipe to a model's process: what is no message, what waits, and the scheduler in front of it."""

import asyncio
import itertools
import marshal
import signal
import socket
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.serving.python.python_models import TIMEOUT_S, call, is_running, value_of

from weft.base.core import CallContext, InferCall
from weft.base.errors import DeadlineExceededError, RequestCancelledError, UnavailableError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, decode, encode
from weft.serving.backends.base import InstanceContext, ModelContext
from weft.serving.backends.python import PythonBackend, process
from weft.serving.backends.python.pipe import (
    INLINE_BYTES,
    Blocks,
    FrameReader,
    MemoryFile,
    Outgoing,
    OutOfStepError,
    Pipe,
    framed,
    incoming_tensors,
    plain,
)
from weft.serving.backends.python.service_end import MAX_LOOP_BYTES, ServiceEnd
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings, WaitPolicy
from weft.serving.runtime import dispatcher, instance
from weft.serving.runtime.idle import make_limiter
from weft.serving.runtime.model import SequenceModel, ServedModel
from weft.serving.scheduler.rate_limiter import RateLimit

PROCESS = {"EXECUTION": "process"}
_MARK = struct.unpack_from("<I", framed(((), None, "x")))[0]


def _head(size):
    return struct.pack("<II", _MARK, size)


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 8,
        b"what a library prints" * 9,
        _head(2**31),
        _head(2**32 - 1) + b"x" * 99,
        _head(3) + b"abc",
        _head(0),
        _head(9) + marshal.dumps((1, 2))[:9].ljust(9, b"\0"),
        _head(len(marshal.dumps([1, 2, 3]))) + marshal.dumps([1, 2, 3]),
    ],
)
def test_what_is_no_message_is_an_error(sent):
    """Neither is more waited for, nor as much memory taken as it says."""
    one, other = socket.socketpair()
    with one, other:
        one.sendall(sent)
        with pytest.raises(OutOfStepError):
            FrameReader(other).read()


def test_messages_in_pieces_of_any_size_are_read():
    """Cut anywhere, several at once, longer than the buffer, and none after the end."""
    one, other = socket.socketpair()
    messages = [((), None, "x", "y" * size) for size in (0, 1, 70_000, 3, 300_000, 9)]
    data, got, reader = b"".join(map(framed, messages)), [], FrameReader(other)

    def send():
        for start in range(0, len(data), 7_777):
            one.sendall(data[start : start + 7_777])
        one.close()

    thread = threading.Thread(target=send)
    thread.start()
    while len(got) < len(messages):
        got += reader.read()
    with pytest.raises(EOFError):
        reader.read()
    thread.join()
    other.close()
    assert messages == got


def test_blocks_are_used_again_and_given_back_once():
    """A block of the same size is the same memory; one that is not taken cannot be given back, nor read."""
    file, blocks = MemoryFile(), Blocks(MemoryFile())
    first = blocks.take(INLINE_BYTES + 1)
    assert first != blocks.take(INLINE_BYTES + 1)
    blocks.give_back(first)
    assert first == blocks.take(2 * INLINE_BYTES)
    for offset in (first + 1, -1, 2**70):
        with pytest.raises(OutOfStepError):
            blocks.give_back(offset)
    for offset, size in ((0, 1), (2**40, 1), (-4096, 1), (2**70, 1), (0, 2**50), (1, 1)):
        with pytest.raises(OutOfStepError):
            file.read(offset, [size])
    for number in (1 << 20, 80 << 20, 1 << 20):  # the second is too large to be kept
        offset = blocks.take(number)
        blocks.file.write(offset, [bytes(number - 1), b"x"])
        assert [b"x"] == [blocks.file.read(offset, [number - 1, 1])[1]]
        assert [b"x"] == [blocks.file.read_aside(offset, [number - 1, 1])[1]]
        assert np.frombuffer(blocks.file.lend(offset, [number - 1, 1])[1], np.uint8).ctypes.data % 64 == 0
        blocks.give_back(offset)


def test_only_plain_values_cross():
    """NumPy's as Python's, and nothing that would have to be looked up."""
    given = {
        "a": np.float32(0.5),
        "b": (np.int64(3), np.array([True])),
        np.str_("c"): b"x",
        "d": [None, memoryview(b"y")],
    }
    got = plain(given)
    assert {"a": 0.5, "b": (3, [True]), "c": b"x", "d": [None, b"y"]} == got
    assert [float, int, bool] == [type(got["a"]), type(got["b"][0]), type(got["b"][1][0])]
    with pytest.raises(TypeError, match="object is no plain value"):
        plain({"a": object()})


async def test_a_full_socket_keeps_everything_in_order():
    """What the other end does not read waits, on this side; large tensors do not change the order."""
    mine, other = socket.socketpair()
    ours, ended = MemoryFile(), asyncio.get_running_loop().create_future()
    end = ServiceEnd(Pipe(mine, ours, MemoryFile()), lambda message, large: None, ended.set_result)
    sizes = [10, 20_000, 0, INLINE_BYTES + 1, MAX_LOOP_BYTES + 1, 5, 3 * MAX_LOOP_BYTES, 1] * 20
    for number, size in enumerate(sizes):
        outgoing = Outgoing()
        tensor = WireTensor("UINT8", (size,), bytes([number]) * size)
        end.send("x", number, outgoing.tensors({"a": tensor}), "y" * 5_000, outgoing=outgoing)

    def read():
        reader, got = FrameReader(other), []
        while len(got) < len(sizes):
            for _, block, *message in reader.read():
                large = () if block is None else ours.read_aside(*block)
                got.append((message[1], incoming_tensors(message[2], large)["a"].data))
        return got

    got = await asyncio.wait_for(asyncio.to_thread(read), TIMEOUT_S)
    assert [(number, bytes([number]) * size) for number, size in enumerate(sizes)] == got
    other.close()
    assert await asyncio.wait_for(ended, TIMEOUT_S) is None
    end.send("x", 0)  # nobody is there, and nothing happens


#: IN says what goes into the pipe; 0: nothing. OUT is IN.
SOURCE = """
import marshal, os, struct, sys, time
import triton_python_backend_utils as pb_utils
from weft.serving.backends.python.pipe import framed

PIPE = int(sys.argv[1])
WHOLE = framed(((), None, "executed", 0, 0, 0, []))
SENT = [
    b"",
    b"what a library prints",
    WHOLE[:4] + struct.pack("<I", 2**31),
    WHOLE[:-3],
    framed(((), None, "unknown", 1)),
    WHOLE,
    framed(((), None, "executed", 10**9, 0, 0, [])),
    framed(([1], None, "hello", "3.11")),
    framed((5, None, "hello", "3.11")),
    framed(((), (2**40, [9]), "hello", "3.11")),
    framed(((), (0, [-1]), "hello", "3.11")),
    framed(((), (0, ["a"]), "hello", "3.11")),
    framed(((), None, "call", 1, 2)),
    framed(((), None, "response", 1)),
    framed(((), None, "loaded")),
]


class TritonPythonModel:
    def execute(self, requests):
        what = int(requests[0].inputs()[0].as_numpy()[0, 0])
        if what < len(SENT):
            os.write(PIPE, SENT[what])
        if what == len(SENT):
            os.write(PIPE, WHOLE[:9])
            os._exit(3)
        if what == len(SENT) + 1:
            os.close(PIPE)
            time.sleep(1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
_NUM_KINDS = 17


async def test_a_process_that_sends_nonsense_is_killed_and_started_again(serve_python, monkeypatch):
    """Its request fails with UNAVAILABLE, whatever came instead of an answer; the next one is answered."""
    monkeypatch.setattr(instance, "PAUSES_S", (0.01,))
    monkeypatch.setattr(process, "REAP_LIMIT_S", 0.1)
    model = await serve_python(None, source=SOURCE, is_decoupled=False, parameters=PROCESS)
    for number in range(1, _NUM_KINDS):
        with pytest.raises(
            UnavailableError, match=r"(no message, and was killed|was killed by SIGKILL|exit status 3) before it had"
        ):
            await asyncio.wait_for(model.infer(call(number), CallContext()), TIMEOUT_S)
        result = await asyncio.wait_for(model.infer(call(0), CallContext()), TIMEOUT_S)
        assert 0.0 == value_of(result)
        assert number == model.statistics.restart_count


@pytest.mark.parametrize("columns", [1, INLINE_BYTES // 4 + 1, MAX_LOOP_BYTES // 4 + 1])
async def test_requests_are_cancelled_at_any_time(serve_python, columns):
    """Before a request is written, while its tensors are copied, and while it is executed; the others are answered."""
    model = await serve_python(None, source=SOURCE, is_decoupled=False, parameters=PROCESS, is_batching=True)
    large = InferCall("m", inputs={"IN": encode(np.full((1, columns), 0.5, np.float32))})
    for num_turns in (*range(6), 20):
        tasks = [asyncio.ensure_future(model.infer(replace(large), CallContext())) for _ in range(3)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        first, second, third = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)
        assert [large.inputs["IN"].data] * 2 == [first.outputs["OUT"].data, third.outputs["OUT"].data]
        assert isinstance(second, asyncio.CancelledError | RequestCancelledError) or second.outputs
    served = model._instances[0]._backend._process
    assert ({}, {}) == (served._requests, served._batches)


#: Of IN the first number says what to do; OUT is what is left in what was kept, and in what a forked copy was given.
KEEPING = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        array = request.inputs()[0].as_numpy()
        if array[0, 0] == 1:
            array += 1
            self.kept = array[:, -10:]
        if array[0, 0] == 5:
            reading, self.ask = os.pipe()
            self.answer, writing = os.pipe()
            if not os.fork():
                os.read(reading, 1)
                os.write(writing, array[:, -10:].tobytes())
                os._exit(0)
        if array[0, 0] == 9:
            os.write(self.ask, b"x")
            said = np.frombuffer(os.read(self.answer, 40), np.float32)
            array = np.concatenate([self.kept, said[None]], axis=1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array[:, -20:])])]
"""


async def test_large_inputs_stay_as_long_as_a_model_has_them(serve_python):
    """It may change and keep them, and have a copy of it read them: what comes later lies elsewhere."""
    model = await serve_python(None, source=KEEPING, is_decoupled=False, parameters=PROCESS)
    for value in (1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0):
        array = np.full((1, INLINE_BYTES), value, np.float32)
        asked = model.infer(InferCall("m", inputs={"IN": encode(array)}), CallContext())
        (answered,) = decode((await asyncio.wait_for(asked, TIMEOUT_S)).outputs["OUT"])
        assert ([2.0] * 10 + [5.0] * 10 if value == 9.0 else [value + (value == 1.0)] * 20) == answered.tolist()


#: OUT is how many executions this process has begun, and IN how long each takes, in milliseconds.
COUNTING = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    count = 0

    def execute(self, requests):
        self.count += 1
        time.sleep(max(float(r.inputs()[0].as_numpy()[0, 0]) for r in requests) / 1000)
        value = np.full((1, 1), self.count, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for _ in requests]
"""


def _late():
    return CallContext(time.monotonic_ns() + 30_000_000)


#: Settings; calls, with the milliseconds that each takes, contexts, and OUT or the error of each.
SCHEDULED: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "one after another": ({}, [(call(0), None, 1), (call(0), None, 2), (call(0), None, 3)]),
    "a batch": ({"is_batching": True}, [(call(0), None, 1), (call(0), None, 1), (call(0), None, 1)]),
    "a queue timeout": (
        {"default_policy": WaitPolicy(default_timeout_us=30_000)},
        [(call(300), None, 1), (call(0), None, DeadlineExceededError)],
    ),
    "a deadline in the queue": ({}, [(call(300), None, 1), (call(0), _late, DeadlineExceededError)]),
    "priorities": (
        {"priority_levels": 2, "default_priority_level": 2},
        [(call(50), None, 1), (call(0), None, 3), (call(1, priority=1), None, 2)],
    ),
    "the order of arrival": (
        {"preserve_ordering": True, "is_batching": True, "max_batch_size": 1, "num_instances": 2},
        [(call(100), None, 1), (call(0), None, 1)],
    ),
    "sequences": (
        {"sequences": SequenceSettings()},
        [
            (call(50, sequence_id=1, sequence_start=True), None, 1),
            (call(0, sequence_id=2, sequence_start=True, sequence_end=True), None, 3),
            (call(0, sequence_id=1, sequence_end=True), None, 2),
        ],
    ),
    "a rate limit": ({"limit": 1, "num_instances": 2}, [(call(50), None, 1), (call(50), None, 1), (call(0), None, 2)]),
}


@pytest.mark.parametrize("name", SCHEDULED)
async def test_the_scheduler_stands_before_the_pipe(tmp_path, name):
    """Whoever waits, waits in the queue: by its policy, in its order, for the resources of an instance."""
    options, calls = SCHEDULED[name]
    settings = dict(options)
    num_instances, limit = settings.pop("num_instances", 1), settings.pop("limit", 0)
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(COUNTING)
    tensors = (TensorSpec("IN", "FP32", (-1,)),), (TensorSpec("OUT", "FP32", (-1,)),)
    context = ModelContext(ModelSignature("m", "1", "python", 8, *tensors), folder, {"name": "m"}, PROCESS)
    rate_limit = RateLimit(1, (), (("R", limit),)) if limit else None
    places = [InstanceContext(f"m_{i}", rate_limit=rate_limit) for i in range(num_instances)]
    limiter = make_limiter({("R", None): limit}) if limit else None
    served = SequenceModel if "sequences" in settings else ServedModel
    scheduler = SchedulerSettings(**{"max_batch_size": 8, **settings})
    model = served(context, PythonBackend, scheduler, places, limiter=limiter)
    await model.start()
    order = itertools.count()
    ended = {}

    async def ask(number, sent, make_context):
        outcome: Any
        try:
            outcome = value_of(await model.infer(sent, make_context() if make_context else CallContext()))
        except DeadlineExceededError as error:
            outcome = type(error)
        ended[number] = next(order)
        return outcome

    tasks = [asyncio.ensure_future(ask(n, sent, context)) for n, (sent, context, _) in enumerate(calls)]
    assert [wanted for *_, wanted in calls] == await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)
    if "preserve_ordering" in settings:
        assert {0: 0, 1: 1} == ended
    await model.stop(grace_s=0.0)


async def test_a_reload_answers_what_executes(serve_python, tmp_path):
    """The old process answers its batch, and is gone; the new one begins afresh, while the old one still executes."""
    old = await serve_python(None, source=COUNTING, is_decoupled=False, parameters=PROCESS)
    running = asyncio.ensure_future(old.infer(call(500), CallContext()))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(old.stop(grace_s=TIMEOUT_S))
    new = await serve_python(None, source=COUNTING, is_decoupled=False, parameters=PROCESS)
    assert 1.0 == value_of(await asyncio.wait_for(new.infer(call(0), CallContext()), TIMEOUT_S))
    assert 1.0 == value_of(await asyncio.wait_for(running, TIMEOUT_S))
    await asyncio.wait_for(stopping, TIMEOUT_S)
    assert not is_running(old._instances[0]._backend._process._process.pid)


async def test_a_plain_model_has_some_requests_in_its_pipe(serve_python, monkeypatch):
    """In their order, and their wait there is time in the queue; those that nobody waits for are not executed."""
    monkeypatch.setattr(dispatcher, "NUM_AHEAD", 3)
    model = await serve_python(None, source=COUNTING, is_decoupled=False, parameters=PROCESS)
    asked = [asyncio.ensure_future(model.infer(call(number), CallContext())) for number in (100, 1, 100, 1, 1, 1)]
    late = asyncio.ensure_future(model.infer(call(2), CallContext(time.monotonic_ns() + 150_000_000)))
    await asyncio.sleep(0.01)
    assert (4, 3) == (len(model._running), model.queue.num_waiting)
    asked.pop(1).cancel()
    assert [1.0, 2.0, 3.0, 4.0, 5.0] == [value_of(result) for result in await asyncio.gather(*asked)]
    with pytest.raises(DeadlineExceededError):
        await late
    queue, compute = model.statistics.queue.total_ns, model.statistics.compute_infer.total_ns
    assert 200_000_000 < compute < queue
    assert queue + compute < model.statistics.success.total_ns


async def test_what_a_process_that_dies_had_not_begun_is_executed_by_the_next(serve_python, monkeypatch):
    """The batch that it executed fails; the others are answered, or fail where no other can be started."""
    monkeypatch.setattr(instance, "PAUSES_S", (0.01,))
    model = await serve_python(None, source=SOURCE, is_decoupled=False, parameters=PROCESS)
    dies = _NUM_KINDS - 2
    for _ in range(2):
        asked = [asyncio.ensure_future(model.infer(call(number), CallContext())) for number in (dies, 0, 0, 0, 0)]
        outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), TIMEOUT_S)
        assert isinstance(outcomes[0], UnavailableError)
        assert [0.0] * 4 == [value_of(outcome) for outcome in outcomes[1:]]
    monkeypatch.setattr(instance, "PAUSES_S", (TIMEOUT_S,))
    asked = [asyncio.ensure_future(model.infer(call(number), CallContext())) for number in (dies, 0)]
    assert [UnavailableError] == [type(error) for error in await asyncio.gather(asked[0], return_exceptions=True)]
    await model.stop(grace_s=0.0)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(asked[1], TIMEOUT_S)


async def test_a_stopped_process_whose_socket_is_full_is_killed(serve_python, monkeypatch):
    """What was half written is executed by the next one, but for the batch that the stopped one may have begun."""
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.05)
    model = await serve_python(None, source=SOURCE, is_decoupled=False, parameters=PROCESS)
    served = model._instances[0]._backend._process
    served._process.send_signal(signal.SIGSTOP)
    large = InferCall("m", inputs={"IN": encode(np.full((1, INLINE_BYTES // 4), 0.5, np.float32))})
    asked = [asyncio.ensure_future(model.infer(replace(large), CallContext())) for _ in range(12)]
    await asyncio.sleep(0.01)
    assert served._end._unsent
    first, *others = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), TIMEOUT_S)
    assert "was stopped by SIGSTOP and killed" in str(first)
    assert [large.inputs["IN"].data] * 11 == [result.outputs["OUT"].data for result in others]
